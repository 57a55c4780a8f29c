#include "coordinator/chat/operators.h"

#include <algorithm>
#include <cmath>
#include <iterator>

#include "coordinator/chat/unicode.h"
#include "fmt/format.h"

namespace tensorfold {
namespace {

// Attributes that Python finds before the key of the same name. A template that reads one without calling it gets the
// method.
constexpr std::string_view kDictMethods[] = {"get", "items", "keys", "values", "copy", "fromkeys"};
// Attributes that the immutable sandbox hides.
constexpr std::string_view kDictMutators[] = {"clear", "pop", "popitem", "setdefault", "update"};
constexpr std::string_view kListMethods[] = {"count", "index", "copy"};
constexpr std::string_view kTextMethods[] = {
    "capitalize", "casefold",   "center",      "count",      "encode",    "endswith", "expandtabs",   "find",
    "format",     "format_map", "index",       "isalnum",    "isalpha",   "isascii",  "isdecimal",    "isdigit",
    "islower",    "isnumeric",  "isprintable", "isspace",    "istitle",   "isupper",  "isidentifier", "join",
    "ljust",      "lower",      "lstrip",      "maketrans",  "partition", "replace",  "removeprefix", "removesuffix",
    "rfind",      "rindex",     "rjust",       "rpartition", "rsplit",    "rstrip",   "split",        "splitlines",
    "startswith", "strip",      "swapcase",    "title",      "translate", "upper",    "zfill"};

template <size_t N>
bool is_one_of(std::string_view name, const std::string_view (&names)[N]) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

bool has_method(const Value& v, std::string_view name) {
  switch (v.kind()) {
    case Kind::kDict:
      return is_one_of(name, kDictMethods);
    case Kind::kText:
      return is_one_of(name, kTextMethods);
    case Kind::kSequence:
      return (v.is_sequence(SequenceKind::kList) || v.is_sequence(SequenceKind::kTuple)) &&
             is_one_of(name, kListMethods);
    default:
      return false;
  }
}

Value unsupported(Runtime& rt, std::string_view op, const Value& a, const Value& b) {
  if (a.is_undefined()) return rt.fail(a.undefined_message());
  if (b.is_undefined()) return rt.fail(b.undefined_message());
  return rt.fail(fmt::format("unsupported operand types for {}: '{}' and '{}'", op, type_name(a), type_name(b)));
}

Value overflow(Runtime& rt) { return rt.fail("a number is too large"); }

// Python rounds quotients towards minus infinity.
TemplateInt floor_divide(TemplateInt a, TemplateInt b) {
  const TemplateInt q = a / b;
  return a % b != 0 && (a < 0) != (b < 0) ? q - 1 : q;
}

double float_modulo(double a, double b) {
  const double m = std::fmod(a, b);
  return m != 0 && (m < 0) != (b < 0) ? m + b : m;
}

Value int_power(Runtime& rt, TemplateInt base, TemplateInt exponent, bool trusted) {
  TemplateInt result = 1;
  if (base == 0 || base == 1 || base == -1) {
    if (exponent == 0) return Value::integer(1, trusted);
    return Value::integer(base == -1 && exponent % 2 == 0 ? 1 : base, trusted);
  }
  if (exponent > 127) return overflow(rt);
  for (TemplateInt i = 0; i < exponent; ++i) {
    if (__builtin_mul_overflow(result, base, &result)) return overflow(rt);
  }
  return Value::integer(result, trusted);
}

Value int_arithmetic(Runtime& rt, Operator op, TemplateInt a, TemplateInt b, bool trusted) {
  TemplateInt result = 0;
  switch (op) {
    case Operator::kAdd:
      if (__builtin_add_overflow(a, b, &result)) return overflow(rt);
      break;
    case Operator::kSubtract:
      if (__builtin_sub_overflow(a, b, &result)) return overflow(rt);
      break;
    case Operator::kMultiply:
      if (__builtin_mul_overflow(a, b, &result)) return overflow(rt);
      break;
    case Operator::kDivide:
      if (b == 0) return rt.fail("division by zero");
      return Value::real(static_cast<double>(a) / static_cast<double>(b), trusted);
    case Operator::kFloorDivide:
    case Operator::kModulo:
      if (b == 0) return rt.fail("division by zero");
      if (b == -1) return int_arithmetic(rt, Operator::kMultiply, op == Operator::kModulo ? 0 : a, -1, trusted);
      result = floor_divide(a, b);
      if (op == Operator::kModulo) result = a - result * b;
      break;
    default:
      if (b >= 0) return int_power(rt, a, b, trusted);
      if (a == 0) return rt.fail("division by zero");
      return Value::real(std::pow(static_cast<double>(a), static_cast<double>(b)), trusted);
  }
  return Value::integer(result, trusted);
}

Value float_arithmetic(Runtime& rt, Operator op, double a, double b, bool trusted) {
  switch (op) {
    case Operator::kAdd:
      return Value::real(a + b, trusted);
    case Operator::kSubtract:
      return Value::real(a - b, trusted);
    case Operator::kMultiply:
      return Value::real(a * b, trusted);
    case Operator::kPower: {
      const double result = std::pow(a, b);
      if (std::isnan(result) && !std::isnan(a) && !std::isnan(b)) return rt.fail("a power has no real value");
      if (std::isinf(result) && std::isfinite(a) && std::isfinite(b)) return overflow(rt);
      return Value::real(result, trusted);
    }
    default:
      break;
  }
  if (b == 0) return rt.fail("division by zero");
  if (op == Operator::kDivide) return Value::real(a / b, trusted);
  if (op == Operator::kModulo) return Value::real(float_modulo(a, b), trusted);
  return Value::real(std::floor(a / b), trusted);
}

Value repeat(Runtime& rt, const Value& v, TemplateInt times) {
  const auto count = static_cast<uint64_t>(std::clamp<TemplateInt>(times, 0, TemplateInt{1} << 40));
  if (v.is_text()) {
    const Text& text = v.text();
    const size_t one = std::max<size_t>(1, text.footprint());
    if (count > rt.limits().memory_bytes / one + 1 || !rt.fits(one * count)) return rt.fits(SIZE_MAX), Value();
    Text out;
    if (text.empty() || !rt.step(static_cast<int64_t>(count / 16))) return rt.text(out);
    if (text.runs().size() == 1) {
      std::string bytes;
      bytes.reserve(text.size() * count);
      for (uint64_t i = 0; i < count; ++i) bytes.append(text.bytes());
      return rt.text(bytes, text.all_trusted());
    }
    for (uint64_t i = 0; i < count; ++i) out.append(text);
    return rt.text(std::move(out));
  }
  const SequenceObject& sequence = v.sequence();
  const size_t one = std::max<size_t>(1, sequence.items.size() * sizeof(Value));
  if (count > rt.limits().memory_bytes / one + 1 || !rt.fits(one * count)) return rt.fits(SIZE_MAX), Value();
  std::vector<Value> items;
  if (!sequence.items.empty()) {
    for (uint64_t i = 0; i < count; ++i) items.insert(items.end(), sequence.items.begin(), sequence.items.end());
  }
  return rt.sequence(std::move(items), sequence.kind);
}

bool can_repeat(const Value& v) {
  return v.is_text() || v.is_sequence(SequenceKind::kList) || v.is_sequence(SequenceKind::kTuple);
}

// "text" % arguments, with the conversions %s, %d, %i and %%.
Value percent_format(Runtime& rt, const Text& format, const Value& argument) {
  std::vector<Value> single = {argument};
  const bool tuple = argument.is_sequence(SequenceKind::kTuple);
  const std::vector<Value>& arguments = tuple ? argument.sequence().items : single;
  Text out;
  size_t used = 0;
  const std::string& bytes = format.bytes();
  for (size_t i = 0; i < bytes.size();) {
    const size_t percent = std::min(bytes.find('%', i), bytes.size());
    out.append(format, i, percent);
    if (percent == bytes.size()) break;
    const char c = percent + 1 < bytes.size() ? bytes[percent + 1] : '\0';
    i = percent + 2;
    if (c == '%') {
      out.append(format, percent, percent + 1);
      continue;
    }
    if (c != 's' && c != 'd' && c != 'i') return rt.fail("only %s, %d and %% are supported in string formatting");
    if (used >= arguments.size()) return rt.fail("not enough arguments for string formatting");
    const Value& v = arguments[used++];
    if (c == 's') {
      append_str(rt, v, &out);
    } else if (v.is_number()) {
      const auto whole = v.kind() == Kind::kFloat ? static_cast<TemplateInt>(v.as_double()) : v.as_int();
      out.append(int_text(whole), v.trusted());
    } else {
      return rt.fail("%d needs a number");
    }
    if (!rt.fits(out.footprint())) return {};
  }
  if (used < arguments.size() && !(argument.is(Kind::kDict) && used == 0)) {
    return rt.fail("not all arguments are used in string formatting");
  }
  return rt.text(std::move(out));
}

Value concatenate(Runtime& rt, const Value& a, const Value& b) {
  if (a.is_text() && b.is_text()) return add_texts(rt, a, b);
  for (const SequenceKind kind : {SequenceKind::kList, SequenceKind::kTuple}) {
    if (!a.is_sequence(kind) || !b.is_sequence(kind)) continue;
    std::vector<Value> items = a.sequence().items;
    items.insert(items.end(), b.sequence().items.begin(), b.sequence().items.end());
    return rt.sequence(std::move(items), kind);
  }
  return unsupported(rt, "+", a, b);
}

std::string_view operator_text(Operator op) {
  static constexpr std::string_view kText[] = {
      "+", "-", "*", "/", "//", "%", "**", "==", "!=", "<", "<=", ">", ">=", "in", "not in"};
  return kText[static_cast<size_t>(op)];
}

bool equal_items(Runtime& rt, const std::vector<Value>& a, const std::vector<Value>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!equal(rt, a[i], b[i])) return false;
  }
  return true;
}

bool equal_dicts(Runtime& rt, const Value& a, const Value& b) {
  if (a.dict().items.size() != b.dict().items.size()) return false;
  for (const auto& [key, value] : a.dict().items) {
    const Value* other = find_key(rt, b, key);
    if (other == nullptr || !equal(rt, value, *other)) return false;
  }
  return true;
}

}  // namespace

std::string type_name(const Value& v) {
  switch (v.kind()) {
    case Kind::kNone:
      return "None";
    case Kind::kBool:
      return "bool";
    case Kind::kInt:
      return "int";
    case Kind::kFloat:
      return "float";
    case Kind::kText:
      return "str object";
    case Kind::kSequence: {
      static constexpr const char* kNames[] = {"list object", "tuple object", "range object", "view object",
                                               "generator"};
      return kNames[static_cast<size_t>(v.sequence().kind)];
    }
    case Kind::kDict:
      return "dict object";
    case Kind::kNamespace:
      return "namespace object";
    case Kind::kMacro:
      return "macro";
    case Kind::kFunction:
      return "function";
    default:
      return "undefined";
  }
}

bool truthy(const Value& v) {
  switch (v.kind()) {
    case Kind::kBool:
      return v.as_bool();
    case Kind::kInt:
      return v.as_int() != 0;
    case Kind::kFloat:
      return v.as_double() != 0;
    case Kind::kText:
      return !v.text().empty();
    case Kind::kSequence:
      return v.sequence().kind == SequenceKind::kGenerator || !v.sequence().items.empty();
    case Kind::kDict:
      return !v.dict().items.empty();
    case Kind::kNamespace:
    case Kind::kMacro:
    case Kind::kFunction:
      return true;
    default:
      return false;
  }
}

bool equal(Runtime& rt, const Value& a, const Value& b) {
  if (!rt.step()) return false;
  if (a.is_number() && b.is_number()) {
    if (a.is_integral() && b.is_integral()) return a.as_int() == b.as_int();
    return a.as_double() == b.as_double();
  }
  if (a.kind() != b.kind()) return false;
  switch (a.kind()) {
    case Kind::kUndefined:
    case Kind::kNone:
      return true;
    case Kind::kText:
      return rt.step(static_cast<int64_t>(a.text().size() / 256)) && a.bytes() == b.bytes();
    case Kind::kSequence:
      if (a.identity() == b.identity()) return true;
      if (a.sequence().kind != b.sequence().kind || a.sequence().kind == SequenceKind::kGenerator) return false;
      return equal_items(rt, a.sequence().items, b.sequence().items);
    case Kind::kDict:
      return a.identity() == b.identity() || equal_dicts(rt, a, b);
    case Kind::kNamespace:
      return a.space() == b.space();
    case Kind::kMacro:
      return a.macro() == b.macro();
    default:
      return a.function() == b.function();
  }
}

bool less(Runtime& rt, const Value& a, const Value& b) {
  if (!rt.step()) return false;
  if (a.is_number() && b.is_number()) {
    if (a.is_integral() && b.is_integral()) return a.as_int() < b.as_int();
    return a.as_double() < b.as_double();
  }
  if (a.is_text() && b.is_text()) return a.bytes() < b.bytes();
  for (const SequenceKind kind : {SequenceKind::kList, SequenceKind::kTuple}) {
    if (!a.is_sequence(kind) || !b.is_sequence(kind)) continue;
    const std::vector<Value>&x = a.sequence().items, &y = b.sequence().items;
    for (size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
      if (!equal(rt, x[i], y[i])) return less(rt, x[i], y[i]);
    }
    return x.size() < y.size();
  }
  unsupported(rt, "<", a, b);
  return false;
}

bool contains(Runtime& rt, const Value& container, const Value& item) {
  switch (container.kind()) {
    case Kind::kUndefined:
      return false;
    case Kind::kText:
      if (!item.is_text()) {
        rt.fail(fmt::format("'in' a string needs a string, not '{}'", type_name(item)));
        return false;
      }
      return rt.step(static_cast<int64_t>(container.text().size() / 64)) &&
             container.bytes().find(item.bytes()) != std::string::npos;
    case Kind::kDict:
      return check_hashable(rt, item) && find_key(rt, container, item) != nullptr;
    case Kind::kSequence: {
      const auto sequence = iterate(rt, container);
      if (!sequence) return false;
      return std::any_of(sequence->items.begin(), sequence->items.end(),
                         [&](const Value& v) { return equal(rt, v, item); });
    }
    default:
      rt.fail(fmt::format("'in' needs a container, not '{}'", type_name(container)));
      return false;
  }
}

bool compare(Runtime& rt, Operator op, const Value& a, const Value& b) {
  switch (op) {
    case Operator::kEqual:
      return equal(rt, a, b);
    case Operator::kNotEqual:
      return !equal(rt, a, b);
    case Operator::kIn:
      return contains(rt, b, a);
    case Operator::kNotIn:
      return !contains(rt, b, a);
    case Operator::kLess:
      return less(rt, a, b);
    case Operator::kGreater:
      return less(rt, b, a);
    default:
      break;
  }
  // Not the negation of the opposite: with NaN both are false.
  const bool strict = op == Operator::kLessEqual ? less(rt, a, b) : less(rt, b, a);
  return strict || equal(rt, a, b);
}

Value binary(Runtime& rt, Operator op, const Value& a, const Value& b) {
  if (rt.failed()) return {};
  if (a.is_number() && b.is_number()) {
    const bool trusted = a.trusted() && b.trusted();
    if (a.is_integral() && b.is_integral()) return int_arithmetic(rt, op, a.as_int(), b.as_int(), trusted);
    return float_arithmetic(rt, op, a.as_double(), b.as_double(), trusted);
  }
  if (op == Operator::kAdd) return concatenate(rt, a, b);
  if (op == Operator::kMultiply) {
    if (can_repeat(a) && b.is_integral()) return repeat(rt, a, b.as_int());
    if (can_repeat(b) && a.is_integral()) return repeat(rt, b, a.as_int());
  }
  if (op == Operator::kModulo && a.is_text() && !b.is_undefined()) return percent_format(rt, a.text(), b);
  return unsupported(rt, operator_text(op), a, b);
}

Value negate(Runtime& rt, const Value& v) {
  if (v.is(Kind::kFloat)) return Value::real(-v.as_double(), v.trusted());
  if (v.is_integral()) return int_arithmetic(rt, Operator::kSubtract, 0, v.as_int(), v.trusted());
  if (v.is_undefined()) return rt.fail(v.undefined_message());
  return rt.fail(fmt::format("a '{}' has no negative", type_name(v)));
}

const Value* find_key(Runtime& rt, const Value& dict, const Value& key) {
  const auto& items = dict.dict().items;
  if (!rt.step(static_cast<int64_t>(items.size() / 16))) return nullptr;
  for (const auto& [name, value] : items) {
    if (key.is_text() ? name.is_text() && name.bytes() == key.bytes() : equal(rt, name, key)) return &value;
  }
  return nullptr;
}

bool check_hashable(Runtime& rt, const Value& key) {
  if (key.is(Kind::kDict) || key.is_sequence(SequenceKind::kList)) {
    rt.fail(fmt::format("a '{}' cannot be a key", type_name(key)));
    return false;
  }
  return true;
}

Value get_attribute(Runtime& rt, const Value& object, std::string_view name) {
  if (rt.failed()) return {};
  if (object.is_undefined()) return rt.fail(object.undefined_message());
  if (object.is(Kind::kNamespace)) {
    for (const auto& [key, value] : object.space()->items) {
      if (key == name) return value;
    }
  }
  if (has_method(object, name)) return Value::function(Function::kMethod);
  if (object.is(Kind::kDict) && !is_one_of(name, kDictMutators) && !name.starts_with("__")) {
    if (!rt.step(static_cast<int64_t>(object.dict().items.size() / 16))) return {};
    for (const auto& [key, value] : object.dict().items) {
      if (key.is_text() && key.bytes() == name) return value;
    }
  }
  return rt.undefined(fmt::format("'{}' has no attribute '{}'", type_name(object), name));
}

Value get_item(Runtime& rt, const Value& object, const Value& key) {
  if (rt.failed()) return {};
  if (object.is_undefined()) return rt.fail(object.undefined_message());
  if (object.is(Kind::kDict)) {
    if (const Value* value = find_key(rt, object, key)) return *value;
  } else if (object.is_text() && key.is_integral()) {
    const std::string& bytes = object.bytes();
    const auto count = static_cast<TemplateInt>(count_code_points(bytes));
    if (!rt.step(static_cast<int64_t>(bytes.size() / 64))) return {};
    const TemplateInt index = key.as_int() < 0 ? key.as_int() + count : key.as_int();
    if (index >= 0 && index < count) {
      size_t begin = byte_offset(bytes, static_cast<size_t>(index));
      size_t end = begin;
      next_code_point(bytes, &end);
      return rt.text(object.text().sub(begin, end));
    }
  } else if (object.is(Kind::kSequence) && key.is_integral() && object.sequence().kind <= SequenceKind::kRange) {
    const auto& items = object.sequence().items;
    const auto count = static_cast<TemplateInt>(items.size());
    const TemplateInt index = key.as_int() < 0 ? key.as_int() + count : key.as_int();
    if (index >= 0 && index < count) return items[static_cast<size_t>(index)];
  }
  if (key.is_text()) {
    if (object.is(Kind::kNamespace)) return get_attribute(rt, object, key.bytes());
    if (has_method(object, key.bytes())) return Value::function(Function::kMethod);
  }
  Text name = key.is_text() || key.is_number() ? to_str(rt, key) : Text(type_name(key), true);
  return rt.undefined(fmt::format("'{}' has no element '{}'", type_name(object), name.bytes().substr(0, 200)));
}

Value slice(Runtime& rt, const Value& object, const Value& start, const Value& stop, const Value& step) {
  if (rt.failed()) return {};
  if (object.is_undefined()) return rt.fail(object.undefined_message());
  const bool text = object.is_text();
  if (!text && !(object.is(Kind::kSequence) && object.sequence().kind <= SequenceKind::kRange)) {
    return rt.undefined(fmt::format("'{}' cannot be sliced", type_name(object)));
  }
  const auto size = static_cast<int64_t>(text ? count_code_points(object.bytes()) : object.sequence().items.size());
  const int64_t by = int_argument(rt, step, 1, "the step of a slice");
  if (rt.failed()) return {};
  if (by == 0) return rt.fail("the step of a slice is zero");
  const auto bound = [&](const Value& v, int64_t fallback) {
    const int64_t i = int_argument(rt, v, fallback, "a bound of a slice");
    if (v.is_absent() || v.is_none()) return fallback;
    return std::clamp<int64_t>(i < 0 ? i + size : i, by < 0 ? -1 : 0, by < 0 ? size - 1 : size);
  };
  const int64_t from = bound(start, by > 0 ? 0 : size - 1);
  const int64_t to = bound(stop, by > 0 ? size : -1);
  if (!rt.step(size / 16)) return {};
  if (text) {
    const std::string& bytes = object.bytes();
    if (by == 1) {
      const size_t begin = byte_offset(bytes, static_cast<size_t>(from));
      return rt.text(object.text().sub(begin, from < to ? byte_offset(bytes, static_cast<size_t>(to)) : begin));
    }
    std::vector<size_t> offsets;
    for (size_t pos = 0; pos < bytes.size(); next_code_point(bytes, &pos)) offsets.push_back(pos);
    offsets.push_back(bytes.size());
    Text out;
    for (int64_t i = from; by > 0 ? i < to : i > to; i += by) {
      out.append(object.text(), offsets[static_cast<size_t>(i)], offsets[static_cast<size_t>(i) + 1]);
      if (by > size || by < -size) break;
    }
    return rt.text(std::move(out));
  }
  std::vector<Value> items;
  for (int64_t i = from; by > 0 ? i < to : i > to; i += by) {
    items.push_back(object.sequence().items[static_cast<size_t>(i)]);
    if (by > size || by < -size) break;
  }
  return rt.sequence(std::move(items), object.sequence().kind);
}

std::shared_ptr<const SequenceObject> iterate(Runtime& rt, const Value& v) {
  std::vector<Value> items;
  if (rt.failed()) return nullptr;
  if (v.is(Kind::kSequence)) {
    auto sequence = v.shared_sequence();
    if (sequence->kind != SequenceKind::kGenerator) return sequence;
    if (!std::exchange(sequence->consumed, true)) return sequence;
  } else if (v.is_text()) {
    const std::string& bytes = v.bytes();
    for (size_t pos = 0; pos < bytes.size();) {
      const size_t begin = pos;
      next_code_point(bytes, &pos);
      items.push_back(rt.text(v.text().sub(begin, pos)));
      if (rt.failed()) return nullptr;
    }
  } else if (v.is(Kind::kDict)) {
    for (const auto& item : v.dict().items) items.push_back(item.first);
  } else if (!v.is_undefined()) {
    rt.fail(fmt::format("'{}' cannot be iterated", type_name(v)));
    return nullptr;
  }
  const Value list = rt.sequence(std::move(items));
  return rt.failed() ? nullptr : list.shared_sequence();
}

int64_t length(Runtime& rt, const Value& v) {
  switch (v.kind()) {
    case Kind::kUndefined:
      return 0;
    case Kind::kText:
      rt.step(static_cast<int64_t>(v.text().size() / 256));
      return static_cast<int64_t>(count_code_points(v.bytes()));
    case Kind::kDict:
      return static_cast<int64_t>(v.dict().items.size());
    case Kind::kSequence:
      if (v.sequence().kind != SequenceKind::kGenerator) return static_cast<int64_t>(v.sequence().items.size());
      [[fallthrough]];
    default:
      rt.fail(fmt::format("a '{}' has no length", type_name(v)));
      return -1;
  }
}

int64_t int_argument(Runtime& rt, const Value& v, int64_t fallback, std::string_view what) {
  if (v.is_absent() || v.is_none()) return fallback;
  if (!v.is_integral()) {
    rt.fail(fmt::format("{} must be an integer, not '{}'", what, type_name(v)));
    return fallback;
  }
  constexpr TemplateInt kBound = TemplateInt{1} << 62;
  return static_cast<int64_t>(std::clamp(v.as_int(), -kBound, kBound));
}

}  // namespace tensorfold
