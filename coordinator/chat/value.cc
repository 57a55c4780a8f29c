#include "coordinator/chat/value.h"

#include <algorithm>

#include "fmt/format.h"

namespace tensorfold {

Object::~Object() {
  if (owner != nullptr) owner->release(charged);
}

Value Value::none(bool trusted) {
  Value v;
  v.kind_ = Kind::kNone;
  v.trusted_ = trusted;
  return v;
}

Value Value::boolean(bool b, bool trusted) {
  Value v;
  v.kind_ = Kind::kBool;
  v.trusted_ = trusted;
  v.scalar_.b = b;
  return v;
}

Value Value::integer(TemplateInt i, bool trusted) {
  Value v;
  v.kind_ = Kind::kInt;
  v.trusted_ = trusted;
  v.scalar_.i = i;
  return v;
}

Value Value::real(double f, bool trusted) {
  Value v;
  v.kind_ = Kind::kFloat;
  v.trusted_ = trusted;
  v.scalar_.f = f;
  return v;
}

Value Value::absent() {
  Value v;
  v.kind_ = Kind::kAbsent;
  return v;
}

Value Value::space(Namespace* ns) {
  Value v;
  v.kind_ = Kind::kNamespace;
  v.scalar_.ns = ns;
  return v;
}

Value Value::macro(const Macro* macro) {
  Value v;
  v.kind_ = Kind::kMacro;
  v.scalar_.macro = macro;
  return v;
}

Value Value::function(Function f) {
  Value v;
  v.kind_ = Kind::kFunction;
  v.scalar_.function = f;
  return v;
}

Value Value::constant(std::string_view bytes) {
  auto object = std::make_shared<TextObject>();
  object->text.append(bytes, true);
  return Value::object(Kind::kText, std::move(object));
}

Value Value::object(Kind kind, std::shared_ptr<const Object> object) {
  Value v;
  v.kind_ = kind;
  v.object_ = std::move(object);
  return v;
}

Value Value::with_trust(bool trusted) const {
  Value v = *this;
  v.trusted_ = trusted;
  return v;
}

bool Value::is_sequence(SequenceKind kind) const { return kind_ == Kind::kSequence && sequence().kind == kind; }

const Text& Value::text() const { return static_cast<const TextObject*>(object_.get())->text; }

bool Value::is_markup() const { return is_text() && static_cast<const TextObject*>(object_.get())->markup; }

const SequenceObject& Value::sequence() const { return *static_cast<const SequenceObject*>(object_.get()); }

const DictObject& Value::dict() const { return *static_cast<const DictObject*>(object_.get()); }

std::shared_ptr<const SequenceObject> Value::shared_sequence() const {
  return std::static_pointer_cast<const SequenceObject>(object_);
}

std::string Value::undefined_message() const {
  return object_ ? static_cast<const UndefinedObject*>(object_.get())->message : "the value is undefined";
}

Value Runtime::fail(std::string message) {
  if (status_.ok()) status_ = absl::InvalidArgumentError(fmt::format("chat template line {}: {}", line_, message));
  return Value();
}

Value Runtime::exhausted(std::string message) {
  if (status_.ok()) status_ = absl::ResourceExhaustedError(fmt::format("chat template line {}: {}", line_, message));
  return Value();
}

Value Runtime::raise(const std::string& message) {
  if (status_.ok()) status_ = absl::InvalidArgumentError(message);
  return Value();
}

bool Runtime::step(int64_t n) {
  if (failed()) return false;
  steps_ += n;
  if (steps_ > limits_.steps) {
    exhausted(fmt::format("rendering takes more than {} steps", limits_.steps));
    return false;
  }
  return true;
}

bool Runtime::fits(size_t bytes) {
  if (failed()) return false;
  if (bytes > limits_.memory_bytes || memory_ > limits_.memory_bytes - bytes) {
    exhausted(fmt::format("rendering needs more than {} bytes of memory", limits_.memory_bytes));
    return false;
  }
  return true;
}

bool Runtime::charge(size_t bytes) {
  if (!fits(bytes)) return false;
  memory_ += bytes;
  return true;
}

bool Runtime::enter() {
  if (failed()) return false;
  if (depth_ >= limits_.depth) {
    exhausted(fmt::format("evaluation is nested more than {} deep", limits_.depth));
    return false;
  }
  ++depth_;
  return true;
}

bool Runtime::adopt(Object* object, size_t bytes) {
  if (object->depth > limits_.value_depth) {
    exhausted(fmt::format("a value is nested more than {} deep", limits_.value_depth));
    return false;
  }
  bytes += 64;  // the object itself and its reference count
  if (!step(static_cast<int64_t>(bytes / 64)) || !charge(bytes)) return false;
  object->owner = this;
  object->charged = bytes;
  return true;
}

Value Runtime::text(Text text, bool markup) {
  auto object = std::make_shared<TextObject>();
  object->markup = markup;
  object->text = std::move(text);
  if (!adopt(object.get(), object->text.footprint())) return Value();
  return Value::object(Kind::kText, std::move(object));
}

Value Runtime::sequence(std::vector<Value> items, SequenceKind kind) {
  auto object = std::make_shared<SequenceObject>();
  object->kind = kind;
  object->items = std::move(items);
  for (const Value& item : object->items) object->depth = std::max(object->depth, item.depth());
  ++object->depth;
  if (!adopt(object.get(), object->items.size() * sizeof(Value))) return Value();
  return Value::object(Kind::kSequence, std::move(object));
}

Value Runtime::dict(std::vector<std::pair<Value, Value>> items) {
  auto object = std::make_shared<DictObject>();
  object->items = std::move(items);
  for (const auto& [key, value] : object->items) {
    object->depth = std::max({object->depth, key.depth(), value.depth()});
  }
  ++object->depth;
  if (!adopt(object.get(), object->items.size() * sizeof(std::pair<Value, Value>))) return Value();
  return Value::object(Kind::kDict, std::move(object));
}

Value Runtime::undefined(std::string message) {
  auto object = std::make_shared<UndefinedObject>();
  object->message = std::move(message);
  if (!adopt(object.get(), object->message.size())) return Value();
  return Value::object(Kind::kUndefined, std::move(object));
}

Namespace* Runtime::make_namespace() {
  if (!charge(sizeof(Namespace) + 64)) return nullptr;
  namespaces_.push_back(std::make_unique<Namespace>());
  return namespaces_.back().get();
}

}  // namespace tensorfold
