#include <ctime>

#include "coordinator/chat/calls.h"
#include "coordinator/chat/operators.h"
#include "fmt/format.h"

namespace tensorfold {
namespace {

Value call_range(Runtime& rt, const Arguments& args) {
  if (!args.keyword.empty() || args.positional.empty() || args.positional.size() > 3) {
    return rt.fail("range takes one to three integers");
  }
  int64_t bounds[3] = {0, 0, 1};
  const bool one = args.positional.size() == 1;
  for (size_t i = 0; i < args.positional.size(); ++i) {
    if (!args.positional[i].is_integral()) return rt.fail("range takes integers");
    bounds[one ? 1 : i] = int_argument(rt, args.positional[i], 0, "range");
  }
  const auto [from, to, by] = bounds;
  if (by == 0) return rt.fail("the step of range is zero");
  std::vector<Value> items;
  for (TemplateInt i = from; by > 0 ? i < to : i > to; i += by) {
    if (items.size() >= rt.limits().range_items) {
      return rt.fail(fmt::format("range of more than {} items", rt.limits().range_items));
    }
    items.push_back(Value::integer(i));
  }
  return rt.sequence(std::move(items), SequenceKind::kRange);
}

// The pairs that dict(...) or namespace(...) are made of.
bool collect_pairs(Runtime& rt, const Arguments& args, std::vector<std::pair<Value, Value>>* items) {
  if (args.positional.size() > 1) {
    rt.fail("dict and namespace take one mapping and keyword arguments");
    return false;
  }
  if (!args.positional.empty()) {
    const Value& base = args.positional[0];
    if (base.is(Kind::kDict)) {
      *items = base.dict().items;
    } else {
      const auto pairs = iterate(rt, base);
      if (!pairs) return false;
      for (const Value& pair : pairs->items) {
        const auto parts = iterate(rt, pair);
        if (!parts || parts->items.size() != 2) {
          rt.fail("dict needs pairs of key and value");
          return false;
        }
        if (!check_hashable(rt, parts->items[0])) return false;
        put_key(rt, items, parts->items[0], parts->items[1]);
      }
    }
  }
  for (const auto& [name, value] : args.keyword) put_key(rt, items, rt.text(name, true), value);
  return !rt.failed();
}

Value call_dict(Runtime& rt, const Arguments& args) {
  std::vector<std::pair<Value, Value>> items;
  return collect_pairs(rt, args, &items) ? rt.dict(std::move(items)) : Value();
}

Value call_namespace(Runtime& rt, const Arguments& args) {
  std::vector<std::pair<Value, Value>> items;
  if (!collect_pairs(rt, args, &items)) return {};
  Namespace* ns = rt.make_namespace();
  if (ns == nullptr) return {};
  for (auto& [key, value] : items) {
    if (key.is_text()) set_namespace_attribute(rt, ns, key.bytes(), std::move(value));
  }
  return Value::space(ns);
}

Value call_raise(Runtime& rt, Arguments* args) {
  if (!bind_arguments(rt, "raise_exception", {"message"}, args)) return {};
  std::string message = args->positional[0].is_absent() ? "" : to_str(rt, args->positional[0]).bytes();
  if (rt.failed()) return {};
  if (message.size() > rt.limits().exception_bytes) {
    size_t end = rt.limits().exception_bytes;
    while (end > 0 && (static_cast<unsigned char>(message[end]) & 0xC0) == 0x80) --end;
    message.resize(end);
  }
  return rt.raise(message);
}

Value call_strftime(Runtime& rt, Arguments* args, const TemplateClock& clock) {
  if (!bind_arguments(rt, "strftime_now", {"format"}, args)) return {};
  const Value& format = args->positional[0];
  if (!format.is_text() || format.text().size() > 256 || format.bytes().find('\0') != std::string::npos) {
    return rt.fail("strftime_now takes a format of at most 256 bytes");
  }
  const std::time_t now = std::chrono::system_clock::to_time_t(clock());
  std::tm parts{};
  if (gmtime_r(&now, &parts) == nullptr) return rt.fail("the clock is out of range");
  std::string buffer(8192, '\0');
  buffer.resize(std::strftime(buffer.data(), buffer.size(), format.bytes().c_str(), &parts));
  return rt.text(buffer, format.text().all_trusted());
}

}  // namespace

void put_key(Runtime& rt, std::vector<std::pair<Value, Value>>* items, Value key, Value value) {
  for (auto& [old, slot] : *items) {
    if (equal(rt, old, key)) {
      slot = std::move(value);
      return;
    }
  }
  items->emplace_back(std::move(key), std::move(value));
}

void set_namespace_attribute(Runtime& rt, Namespace* ns, const std::string& name, Value value) {
  if (!rt.step(static_cast<int64_t>(ns->items.size() / 16))) return;
  for (auto& [key, old] : ns->items) {
    if (key == name) {
      old = std::move(value);
      return;
    }
  }
  if (rt.charge(sizeof(std::pair<std::string, Value>) + name.size())) ns->items.emplace_back(name, std::move(value));
}

Value call_function(Runtime& rt, Function function, Arguments args, const TemplateClock& clock) {
  switch (function) {
    case Function::kRange:
      return call_range(rt, args);
    case Function::kDict:
      return call_dict(rt, args);
    case Function::kNamespace:
      return call_namespace(rt, args);
    case Function::kRaiseException:
      return call_raise(rt, &args);
    case Function::kStrftimeNow:
      return call_strftime(rt, &args, clock);
    case Function::kMethod:
      break;
  }
  return rt.fail("a method can only be called as object.method(...)");
}

}  // namespace tensorfold
