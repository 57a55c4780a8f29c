#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "coordinator/chat/text.h"

namespace tensorfold {

// Wide enough for every integer that JSON carries; anything that leaves it is an error, not a wrap.
__extension__ using TemplateInt = __int128;

// What a template, and one rendering of it, may cost. A limit that is passed ends the load or the rendering with an
// error.
struct TemplateLimits {
  size_t source_bytes = 1u << 20;
  size_t nodes = 100'000;            // of the syntax tree
  int nesting = 120;                 // height of the syntax tree, and depth of the parser
  int depth = 500;                   // nested evaluations: nesting plus macro calls
  int value_depth = 64;              // lists in lists in …
  int64_t steps = 10'000'000;        // evaluations, and one for each 64 bytes moved
  size_t output_bytes = 64u << 20;   // of the rendered prompt
  size_t memory_bytes = 256u << 20;  // of all values alive at once
  size_t range_items = 100'000;      // of one range(), as jinja2's sandbox has it
  size_t exception_bytes = 4096;     // of a message that the template raises
};

class Runtime;
class Value;
struct Namespace;
struct Macro;

enum class Kind : uint8_t {
  kAbsent,  // an argument that was not given; never seen by a template
  kUndefined,
  kNone,
  kBool,
  kInt,
  kFloat,
  kText,
  kSequence,
  kDict,
  kNamespace,
  kMacro,
  kFunction,  // a builtin function, or a method that was named and not called
};

// Which Python type a sequence stands for: they differ in truth, length, indexing and printing.
enum class SequenceKind : uint8_t { kList, kTuple, kRange, kView, kGenerator };

enum class Function : uint8_t { kRange, kDict, kNamespace, kRaiseException, kStrftimeNow, kMethod };

// Heap part of a value. Immutable once made, apart from a generator's `consumed`. Returns its bytes to the budget of
// its rendering when it dies; a constant of the template has no owner.
struct Object {
  virtual ~Object();
  Runtime* owner = nullptr;
  size_t charged = 0;
  int depth = 0;
};

struct TextObject;
struct SequenceObject;
struct DictObject;

// A value of the template language. Copying is cheap (a reference). Numbers, booleans and none carry one provenance
// bit; strings carry theirs in Text.
class Value {
 public:
  Value() = default;
  static Value none(bool trusted = true);
  static Value boolean(bool b, bool trusted = true);
  static Value integer(TemplateInt i, bool trusted = true);
  static Value real(double f, bool trusted = true);
  static Value absent();
  static Value space(Namespace* ns);
  static Value macro(const Macro* macro);
  static Value function(Function f);
  // A string that lives as long as its references, outside any budget: for constants of the template.
  static Value constant(std::string_view bytes);
  static Value object(Kind kind, std::shared_ptr<const Object> object);

  Kind kind() const { return kind_; }
  bool is(Kind kind) const { return kind_ == kind; }
  bool is_absent() const { return kind_ == Kind::kAbsent; }
  bool is_undefined() const { return kind_ == Kind::kUndefined; }
  bool is_none() const { return kind_ == Kind::kNone; }
  bool is_text() const { return kind_ == Kind::kText; }
  bool is_integral() const { return kind_ == Kind::kInt || kind_ == Kind::kBool; }
  bool is_number() const { return is_integral() || kind_ == Kind::kFloat; }
  bool is_sequence(SequenceKind kind) const;
  // Provenance of a scalar, and of the brackets and commas of a container when it is printed.
  bool trusted() const { return trusted_; }
  Value with_trust(bool trusted) const;
  int depth() const { return object_ ? object_->depth : 0; }

  bool as_bool() const { return scalar_.b; }
  TemplateInt as_int() const { return kind_ == Kind::kBool ? (scalar_.b ? 1 : 0) : scalar_.i; }
  double as_double() const { return kind_ == Kind::kFloat ? scalar_.f : static_cast<double>(as_int()); }
  const Text& text() const;
  bool is_markup() const;
  const std::string& bytes() const { return text().bytes(); }
  const SequenceObject& sequence() const;
  const DictObject& dict() const;
  std::shared_ptr<const SequenceObject> shared_sequence() const;
  Namespace* space() const { return scalar_.ns; }
  const Macro* macro() const { return scalar_.macro; }
  Function function() const { return scalar_.function; }
  // Why an undefined value is undefined.
  std::string undefined_message() const;
  const Object* identity() const { return object_.get(); }

 private:
  Kind kind_ = Kind::kUndefined;
  bool trusted_ = true;
  union {
    bool b;
    TemplateInt i;
    double f;
    Namespace* ns;
    const Macro* macro;
    Function function;
  } scalar_ = {.i = 0};
  std::shared_ptr<const Object> object_;
};

struct TextObject : Object {
  Text text;
  bool markup = false;  // marked by the filter `safe`: + HTML-escapes what is added to it (jinja2's Markup)
};

struct SequenceObject : Object {
  SequenceKind kind = SequenceKind::kList;
  std::vector<Value> items;
  mutable bool consumed = false;  // a generator gives its items once
};

struct DictObject : Object {
  std::vector<std::pair<Value, Value>> items;  // in order of insertion, keys distinct
};

struct UndefinedObject : Object {
  std::string message;
};

// namespace() objects are the only mutable values. The rendering owns them, so that a namespace that holds itself is no
// cycle of references; values refer to them by pointer.
struct Namespace {
  std::vector<std::pair<std::string, Value>> items;
};

// The state of one rendering that every operation shares: budgets, the first error, the line being evaluated. After an
// error every operation returns an undefined value at once, so that callers need no test after each step; the error is
// what the rendering returns.
class Runtime {
 public:
  explicit Runtime(const TemplateLimits& limits) : limits_(limits) {}
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  const TemplateLimits& limits() const { return limits_; }
  bool failed() const { return !status_.ok(); }
  const absl::Status& status() const { return status_; }
  int line() const { return line_; }
  void set_line(int line) { line_ = line; }

  // Records "chat template line N: message" as InvalidArgument, if it is the first error. Returns an undefined value.
  Value fail(std::string message);
  // The same, as ResourceExhausted: a budget is spent.
  Value exhausted(std::string message);
  // The template's own refusal: InvalidArgument with just this message.
  Value raise(const std::string& message);

  // False when the steps are spent or an error was seen.
  bool step(int64_t n = 1);
  // False when a string of `bytes` cannot be made.
  bool fits(size_t bytes);
  bool charge(size_t bytes);
  void release(size_t bytes) { memory_ -= bytes; }

  // Depth guard of everything that recurses: `if (!rt.enter()) return {}; … rt.leave();`
  bool enter();
  void leave() { --depth_; }

  Value text(Text text, bool markup = false);
  Value text(std::string_view bytes, bool trusted) { return text(Text(bytes, trusted)); }
  Value sequence(std::vector<Value> items, SequenceKind kind = SequenceKind::kList);
  Value dict(std::vector<std::pair<Value, Value>> items);
  Value undefined(std::string message);
  Namespace* make_namespace();

 private:
  bool adopt(Object* object, size_t bytes);

  const TemplateLimits limits_;
  absl::Status status_;
  int line_ = 1;
  int depth_ = 0;
  int64_t steps_ = 0;
  size_t memory_ = 0;
  std::vector<std::unique_ptr<Namespace>> namespaces_;
};

// RAII form of Runtime::enter().
class DepthGuard {
 public:
  explicit DepthGuard(Runtime& rt) : rt_(rt), ok_(rt.enter()) {}
  ~DepthGuard() {
    if (ok_) rt_.leave();
  }
  DepthGuard(const DepthGuard&) = delete;
  DepthGuard& operator=(const DepthGuard&) = delete;
  bool ok() const { return ok_; }

 private:
  Runtime& rt_;
  bool ok_;
};

}  // namespace tensorfold
