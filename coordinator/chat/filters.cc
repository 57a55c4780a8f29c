#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>
#include <optional>

#include "coordinator/chat/calls.h"
#include "coordinator/chat/operators.h"
#include "coordinator/chat/unicode.h"
#include "fmt/format.h"

namespace tensorfold {
namespace {

Text text_argument(Runtime& rt, const Value& v, std::string_view fallback) {
  return v.is_absent() ? Text(fallback, true) : to_str(rt, v);
}

bool flag_argument(const Value& v, bool fallback) { return v.is_absent() ? fallback : truthy(v); }

// The parts of an attribute path: "a.b.0" looks up 'a', then 'b', then 0.
std::vector<Value> attribute_path(Runtime& rt, const Value& attribute) {
  std::vector<Value> parts;
  if (attribute.is_absent() || attribute.is_none()) return parts;
  if (!attribute.is_text()) return {attribute};
  const std::string& path = attribute.bytes();
  for (size_t begin = 0; begin <= path.size() && !rt.failed();) {
    const size_t end = std::min(path.find('.', begin), path.size());
    const std::string_view part = std::string_view(path).substr(begin, end - begin);
    int64_t index = 0;
    const auto result = std::from_chars(part.data(), part.data() + part.size(), index);
    const bool digits =
        !part.empty() && part[0] != '-' && result.ec == std::errc() && result.ptr == part.data() + part.size();
    parts.push_back(digits ? Value::integer(index) : rt.text(part, true));
    begin = end + 1;
  }
  return parts;
}

Value follow_path(Runtime& rt, Value item, const std::vector<Value>& path) {
  for (const Value& part : path) item = get_item(rt, item, part);
  return item;
}

Value fold_case(Runtime& rt, const Value& v) {
  return v.is_text() ? rt.text(to_lower(v.bytes()), true) : v;  // a key to compare; never printed
}

// A merge sort, because a comparison may fail half way and std::sort needs an order that never does.
void merge_sort(Runtime& rt, const std::vector<std::vector<Value>>& keys, bool reverse, std::vector<size_t>* order) {
  const auto before = [&](size_t a, size_t b) {
    for (size_t k = 0; k < keys[a].size(); ++k) {
      const Value &x = keys[a][k], &y = keys[b][k];
      if (!equal(rt, x, y)) return reverse ? less(rt, y, x) : less(rt, x, y);
    }
    return false;
  };
  std::vector<size_t> other(order->size());
  for (size_t width = 1; width < order->size(); width *= 2) {
    for (size_t begin = 0; begin < order->size(); begin += 2 * width) {
      const size_t middle = std::min(begin + width, order->size());
      const size_t end = std::min(begin + 2 * width, order->size());
      size_t left = begin, right = middle;
      for (size_t out = begin; out < end; ++out) {
        const bool take_right = left == middle || (right < end && before((*order)[right], (*order)[left]));
        other[out] = take_right ? (*order)[right++] : (*order)[left++];
      }
      if (rt.failed()) return;
    }
    order->swap(other);
  }
}

std::vector<size_t> sorted_order(Runtime& rt, const std::vector<std::vector<Value>>& keys, bool reverse) {
  std::vector<size_t> order(keys.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  merge_sort(rt, keys, reverse, &order);
  return order;
}

Value filter_tojson(Runtime& rt, const Value& v, Arguments& args) {
  JsonStyle style;
  style.ensure_ascii = flag_argument(args.positional[0], false);
  const Value& indent = args.positional[1];
  if (!indent.is_absent() && !indent.is_none()) {
    style.indented = true;
    style.item_separator = Text(",", true);
    if (indent.is_text()) {
      style.indent = indent.text();
    } else {
      const int64_t width = std::clamp<int64_t>(int_argument(rt, indent, 0, "tojson's indent"), 0, 64);
      style.indent = Text(std::string(static_cast<size_t>(width), ' '), true);
    }
  }
  const Value& separators = args.positional[2];
  if (!separators.is_absent() && !separators.is_none()) {
    if (!separators.is(Kind::kSequence) || separators.sequence().items.size() != 2) {
      return rt.fail("tojson's separators must be a pair of strings");
    }
    style.item_separator = to_str(rt, separators.sequence().items[0]);
    style.key_separator = to_str(rt, separators.sequence().items[1]);
  }
  style.sort_keys = flag_argument(args.positional[3], false);
  Text out;
  append_json(rt, v, style, &out);
  return rt.text(std::move(out));
}

Value filter_items(Runtime& rt, const Value& v, Arguments&) {
  if (v.is_undefined()) return rt.sequence({}, SequenceKind::kGenerator);
  if (!v.is(Kind::kDict)) return rt.fail(fmt::format("items needs a mapping, not '{}'", type_name(v)));
  return dict_items(rt, v, SequenceKind::kGenerator);
}

Value filter_trim(Runtime& rt, const Value& v, Arguments& args) {
  return rt.text(strip_text(rt, to_str(rt, v), args.positional[0], true, true), v.is_markup());
}

Value filter_length(Runtime& rt, const Value& v, Arguments&) { return Value::integer(length(rt, v)); }

Value filter_default(Runtime& rt, const Value& v, Arguments& args) {
  if (!v.is_undefined() && !(flag_argument(args.positional[1], false) && !truthy(v))) return v;
  return args.positional[0].is_absent() ? rt.text("", true) : args.positional[0];
}

Value filter_join(Runtime& rt, const Value& v, Arguments& args) {
  const auto sequence = iterate(rt, v);
  if (!sequence) return {};
  const Text separator = text_argument(rt, args.positional[0], "");
  const std::vector<Value> path = attribute_path(rt, args.positional[1]);
  return rt.text(
      join_text(rt, separator, sequence->items, [&](const Value& item) { return follow_path(rt, item, path); }));
}

Value filter_list(Runtime& rt, const Value& v, Arguments&) {
  const auto sequence = iterate(rt, v);
  return sequence ? rt.sequence(sequence->items).with_trust(v.trusted()) : Value();
}

Value filter_first(Runtime& rt, const Value& v, Arguments&) {
  if (v.is_sequence(SequenceKind::kGenerator) && v.sequence().consumed) return rt.undefined("the sequence is empty");
  const auto sequence = iterate(rt, v);
  if (!sequence) return {};
  return sequence->items.empty() ? rt.undefined("no first item, the sequence is empty") : sequence->items.front();
}

Value filter_last(Runtime& rt, const Value& v, Arguments&) {
  if (v.is_sequence(SequenceKind::kGenerator)) return rt.fail("'last' needs a list; write |list|last");
  const auto sequence = iterate(rt, v);
  if (!sequence) return {};
  return sequence->items.empty() ? rt.undefined("no last item, the sequence is empty") : sequence->items.back();
}

Value filter_map(Runtime& rt, const Value& v, Arguments& args) {
  if (!truthy(v)) return rt.sequence({}, SequenceKind::kGenerator);  // none, too, is no error here
  const auto sequence = iterate(rt, v);
  if (!sequence) return {};
  std::vector<Value> out;
  if (args.positional.empty()) {
    Value attribute = Value::absent(), fallback = Value::absent();
    for (auto& [name, value] : args.keyword) {
      if (name != "attribute" && name != "default") return rt.fail(fmt::format("map has no argument '{}'", name));
      (name == "attribute" ? attribute : fallback) = value;
    }
    if (attribute.is_absent()) return rt.fail("map needs a filter or an attribute");
    const std::vector<Value> path = attribute_path(rt, attribute);
    for (Value item : sequence->items) {
      for (const Value& part : path) {
        item = get_item(rt, item, part);
        if (item.is_undefined() && !fallback.is_absent() && !fallback.is_none() && !rt.failed()) item = fallback;
      }
      if (!rt.step()) return {};
      out.push_back(std::move(item));
    }
    return rt.sequence(std::move(out), SequenceKind::kGenerator);
  }
  if (!args.positional[0].is_text()) return rt.fail("map needs the name of a filter");
  const std::string name = args.positional[0].bytes();
  const FilterDef* filter = find_filter(name);
  if (filter == nullptr) return rt.fail(fmt::format("filter '{}' is not supported", name));
  for (const Value& item : sequence->items) {
    Arguments rest = args;
    rest.positional.erase(rest.positional.begin());
    out.push_back(call_filter(rt, *filter, item, std::move(rest)));
    if (rt.failed()) return {};
  }
  return rt.sequence(std::move(out), SequenceKind::kGenerator);
}

// select, reject, selectattr, rejectattr: keeps the items whose test, or truth, is `wanted`.
Value select_items(Runtime& rt, const Value& v, const Arguments& args, bool wanted, bool by_attribute) {
  if (!truthy(v)) return rt.sequence({}, SequenceKind::kGenerator);  // none, too, is no error here
  const auto sequence = iterate(rt, v);
  if (!sequence) return {};
  if (!args.keyword.empty()) return rt.fail("select and reject take no keyword arguments");
  size_t used = 0;
  std::vector<Value> path;
  if (by_attribute) {
    if (args.positional.empty()) return rt.fail("selectattr and rejectattr need the name of an attribute");
    path = attribute_path(rt, args.positional[used++]);
  }
  const TestDef* test = nullptr;
  if (args.positional.size() > used) {
    const Value& name = args.positional[used++];
    test = name.is_text() ? find_test(name.bytes()) : nullptr;
    if (test == nullptr) return rt.fail(fmt::format("test '{}' is not supported", to_str(rt, name).bytes()));
  }
  const std::vector<Value> rest(args.positional.begin() + static_cast<ptrdiff_t>(used), args.positional.end());
  if (test != nullptr && rest.size() != test->args) {
    return rt.fail(fmt::format("test '{}' takes {} arguments", test->name, test->args));
  }
  std::vector<Value> out;
  for (const Value& item : sequence->items) {
    const Value subject = by_attribute ? follow_path(rt, item, path) : item;
    const bool passed = test == nullptr ? truthy(subject) : test->apply(rt, subject, rest);
    if (!rt.step()) return {};
    if (passed == wanted) out.push_back(item);
  }
  return rt.sequence(std::move(out), SequenceKind::kGenerator);
}

Value filter_select(Runtime& rt, const Value& v, Arguments& args) { return select_items(rt, v, args, true, false); }
Value filter_reject(Runtime& rt, const Value& v, Arguments& args) { return select_items(rt, v, args, false, false); }
Value filter_selectattr(Runtime& rt, const Value& v, Arguments& args) { return select_items(rt, v, args, true, true); }
Value filter_rejectattr(Runtime& rt, const Value& v, Arguments& args) { return select_items(rt, v, args, false, true); }

Value filter_string(Runtime& rt, const Value& v, Arguments&) { return v.is_text() ? v : rt.text(to_str(rt, v)); }

Value filter_safe(Runtime& rt, const Value& v, Arguments&) { return rt.text(to_str(rt, v), true); }

Value filter_replace(Runtime& rt, const Value& v, Arguments& args) {
  if (args.positional[0].is_absent() || args.positional[1].is_absent()) return rt.fail("replace needs two strings");
  return replace_text(rt, to_str(rt, v), to_str(rt, args.positional[0]), to_str(rt, args.positional[1]),
                      args.positional[2]);
}

Value filter_upper(Runtime& rt, const Value& v, Arguments&) {
  return rt.text(map_case(to_str(rt, v), CaseMap::kUpper));
}
Value filter_lower(Runtime& rt, const Value& v, Arguments&) {
  return rt.text(map_case(to_str(rt, v), CaseMap::kLower));
}
Value filter_capitalize(Runtime& rt, const Value& v, Arguments&) {
  return rt.text(map_case(to_str(rt, v), CaseMap::kCapitalize));
}
Value filter_title(Runtime& rt, const Value& v, Arguments&) {
  return rt.text(map_case(to_str(rt, v), CaseMap::kTitleFilter));
}

// What int() and float() of Python read: spaces around, single underscores between digits.
std::string number_text(std::string_view s) {
  std::string out(strip_left(strip_right(s)));
  for (size_t i = 0; i < out.size();) {
    const auto digit = [&](size_t k) { return k < out.size() && out[k] >= '0' && out[k] <= '9'; };
    if (out[i] == '_' && i > 0 && digit(i - 1) && digit(i + 1)) {
      out.erase(i, 1);
    } else {
      ++i;
    }
  }
  if (out.size() > 1 && out[0] == '+' && out[1] != '-') out.erase(0, 1);
  return out;
}

std::optional<double> parse_double(std::string_view s) {
  const std::string text = number_text(s);
  double value = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), value);
  if (result.ptr != text.data() + text.size() || text.empty() || text.find('(') != std::string::npos)
    return std::nullopt;
  if (result.ec == std::errc::result_out_of_range) return std::nullopt;
  return value;
}

bool all_trusted(const Value& v) { return v.is_text() ? v.text().all_trusted() : v.trusted(); }

Value filter_int(Runtime& rt, const Value& v, Arguments& args) {
  Value fallback = args.positional[0].is_absent() ? Value::integer(0) : args.positional[0];
  if (v.is_integral()) return Value::integer(v.as_int(), v.trusted());
  if (v.is_undefined()) return rt.fail(v.undefined_message());
  std::optional<double> real;
  if (v.is(Kind::kFloat)) real = v.as_double();
  if (v.is_text()) {
    const std::string text = number_text(v.bytes());
    const int64_t base = int_argument(rt, args.positional[1], 10, "int's base");
    if (base < 2 || base > 36) return rt.fail("int's base must be between 2 and 36");
    int64_t value = 0;
    const auto result = std::from_chars(text.data(), text.data() + text.size(), value, static_cast<int>(base));
    if (result.ec == std::errc() && result.ptr == text.data() + text.size())
      return Value::integer(value, all_trusted(v));
    if (result.ec == std::errc::result_out_of_range) return rt.fail("a number is too large");
    real = parse_double(v.bytes());
  }
  if (!real || !std::isfinite(*real)) return fallback;
  if (std::abs(*real) > 1e18) return rt.fail("a number is too large");
  return Value::integer(static_cast<int64_t>(*real), all_trusted(v));
}

Value filter_float(Runtime& rt, const Value& v, Arguments& args) {
  if (v.is_number()) return Value::real(v.as_double(), v.trusted());
  if (v.is_undefined()) return rt.fail(v.undefined_message());
  if (v.is_text()) {
    if (const std::optional<double> real = parse_double(v.bytes())) return Value::real(*real, all_trusted(v));
  }
  return args.positional[0].is_absent() ? Value::real(0) : args.positional[0];
}

Value filter_abs(Runtime& rt, const Value& v, Arguments&) {
  if (v.is(Kind::kFloat)) return Value::real(std::abs(v.as_double()), v.trusted());
  if (!v.is_integral()) return rt.fail(fmt::format("abs needs a number, not '{}'", type_name(v)));
  return v.as_int() < 0 ? negate(rt, v) : Value::integer(v.as_int(), v.trusted());
}

Value filter_unique(Runtime& rt, const Value& v, Arguments& args) {
  const auto sequence = iterate(rt, v);
  if (!sequence) return {};
  const bool case_sensitive = flag_argument(args.positional[0], false);
  const std::vector<Value> path = attribute_path(rt, args.positional[1]);
  std::vector<Value> out, seen;
  for (const Value& item : sequence->items) {
    Value key = follow_path(rt, item, path);
    if (!case_sensitive) key = fold_case(rt, key);
    if (!check_hashable(rt, key)) return {};
    if (std::any_of(seen.begin(), seen.end(), [&](const Value& s) { return equal(rt, s, key); })) continue;
    if (rt.failed()) return {};
    seen.push_back(key);
    out.push_back(item);
  }
  return rt.sequence(std::move(out), SequenceKind::kGenerator);
}

Value filter_sort(Runtime& rt, const Value& v, Arguments& args) {
  const auto sequence = iterate(rt, v);
  if (!sequence) return {};
  const bool case_sensitive = flag_argument(args.positional[1], false);
  std::vector<std::vector<Value>> paths;
  const Value& attribute = args.positional[2];
  if (attribute.is_text()) {
    for (const Text& part : split_text(attribute.text(), ",", -1)) paths.push_back(attribute_path(rt, rt.text(part)));
  } else {
    paths.push_back(attribute_path(rt, attribute));
  }
  std::vector<std::vector<Value>> keys;
  for (const Value& item : sequence->items) {
    keys.emplace_back();
    for (const auto& path : paths) {
      const Value key = follow_path(rt, item, path);
      keys.back().push_back(case_sensitive ? key : fold_case(rt, key));
    }
    if (rt.failed()) return {};
  }
  std::vector<Value> out;
  for (const size_t i : sorted_order(rt, keys, flag_argument(args.positional[0], false)))
    out.push_back(sequence->items[i]);
  return rt.sequence(std::move(out)).with_trust(v.trusted());
}

Value filter_dictsort(Runtime& rt, const Value& v, Arguments& args) {
  if (!v.is(Kind::kDict)) return rt.fail(fmt::format("dictsort needs a mapping, not '{}'", type_name(v)));
  const bool case_sensitive = flag_argument(args.positional[0], false);
  const std::string by = text_argument(rt, args.positional[1], "key").bytes();
  if (by != "key" && by != "value") return rt.fail("dictsort sorts by 'key' or 'value'");
  std::vector<std::vector<Value>> keys;
  for (const auto& [key, value] : v.dict().items) {
    const Value& chosen = by == "key" ? key : value;
    keys.push_back({case_sensitive ? chosen : fold_case(rt, chosen)});
  }
  const Value pairs = dict_items(rt, v, SequenceKind::kList);
  if (rt.failed()) return {};
  std::vector<Value> out;
  for (const size_t i : sorted_order(rt, keys, flag_argument(args.positional[2], false))) {
    out.push_back(pairs.sequence().items[i]);
  }
  return rt.sequence(std::move(out)).with_trust(v.trusted());
}

Value filter_reverse(Runtime& rt, const Value& v, Arguments&) {
  if (v.is_text()) return slice(rt, v, Value::absent(), Value::absent(), Value::integer(-1));
  const auto sequence = iterate(rt, v);
  if (!sequence) return {};
  return rt.sequence({sequence->items.rbegin(), sequence->items.rend()}, SequenceKind::kGenerator);
}

Value filter_indent(Runtime& rt, const Value& v, Arguments& args) {
  Text pad;
  if (args.positional[0].is_text()) {
    pad = args.positional[0].text();
  } else {
    const int64_t width = std::clamp<int64_t>(int_argument(rt, args.positional[0], 4, "indent's width"), 0, 1024);
    pad = Text(std::string(static_cast<size_t>(width), ' '), true);
  }
  Text text = to_str(rt, v);
  text.append("\n", true);  // as jinja2 does, so that a last line break is kept
  const std::vector<Text> lines = split_lines(text, false);
  const bool first = flag_argument(args.positional[1], false);
  const bool blank = flag_argument(args.positional[2], false);
  Text out;
  for (size_t i = 0; i < lines.size() && rt.fits(out.footprint()); ++i) {
    if (i != 0) out.append("\n", true);
    if (i == 0 ? first : (blank || !lines[i].empty())) out.append(pad);
    out.append(lines[i]);
  }
  return rt.text(std::move(out));
}

Value extreme(Runtime& rt, const Value& v, const Arguments& args, bool greatest) {
  const auto sequence = iterate(rt, v);
  if (!sequence) return {};
  if (sequence->items.empty()) return rt.undefined("the sequence is empty");
  const bool case_sensitive = flag_argument(args.positional[0], false);
  const std::vector<Value> path = attribute_path(rt, args.positional[1]);
  const auto key_of = [&](const Value& item) {
    const Value key = follow_path(rt, item, path);
    return case_sensitive ? key : fold_case(rt, key);
  };
  size_t best = 0;
  Value best_key = key_of(sequence->items[0]);
  for (size_t i = 1; i < sequence->items.size() && !rt.failed(); ++i) {
    Value key = key_of(sequence->items[i]);
    if (greatest ? less(rt, best_key, key) : less(rt, key, best_key)) {
      best = i;
      best_key = std::move(key);
    }
  }
  return sequence->items[best];
}

Value filter_min(Runtime& rt, const Value& v, Arguments& args) { return extreme(rt, v, args, false); }
Value filter_max(Runtime& rt, const Value& v, Arguments& args) { return extreme(rt, v, args, true); }

Value filter_sum(Runtime& rt, const Value& v, Arguments& args) {
  const auto sequence = iterate(rt, v);
  if (!sequence) return {};
  const std::vector<Value> path = attribute_path(rt, args.positional[0]);
  Value total = args.positional[1].is_absent() ? Value::integer(0) : args.positional[1];
  for (const Value& item : sequence->items) total = binary(rt, Operator::kAdd, total, follow_path(rt, item, path));
  return total;
}

const std::map<std::string_view, FilterDef>& filters() {
  static const auto* const table = [] {
    const FilterDef defs[] = {
        {"abs", filter_abs, {}},
        {"capitalize", filter_capitalize, {}},
        {"count", filter_length, {}},
        {"d", filter_default, {"default_value", "boolean"}},
        {"default", filter_default, {"default_value", "boolean"}},
        {"dictsort", filter_dictsort, {"case_sensitive", "by", "reverse"}},
        {"first", filter_first, {}},
        {"float", filter_float, {"default"}},
        {"indent", filter_indent, {"width", "first", "blank"}},
        {"int", filter_int, {"default", "base"}},
        {"items", filter_items, {}},
        {"join", filter_join, {"d", "attribute"}},
        {"last", filter_last, {}},
        {"length", filter_length, {}},
        {"list", filter_list, {}},
        {"lower", filter_lower, {}},
        {"map", filter_map, {}, true},
        {"max", filter_max, {"case_sensitive", "attribute"}},
        {"min", filter_min, {"case_sensitive", "attribute"}},
        {"reject", filter_reject, {}, true},
        {"rejectattr", filter_rejectattr, {}, true},
        {"replace", filter_replace, {"old", "new", "count"}},
        {"reverse", filter_reverse, {}},
        {"safe", filter_safe, {}},
        {"select", filter_select, {}, true},
        {"selectattr", filter_selectattr, {}, true},
        {"sort", filter_sort, {"reverse", "case_sensitive", "attribute"}},
        {"string", filter_string, {}},
        {"sum", filter_sum, {"attribute", "start"}},
        {"title", filter_title, {}},
        {"tojson", filter_tojson, {"ensure_ascii", "indent", "separators", "sort_keys"}},
        {"trim", filter_trim, {"chars"}},
        {"unique", filter_unique, {"case_sensitive", "attribute"}},
        {"upper", filter_upper, {}},
    };
    auto* map = new std::map<std::string_view, FilterDef>;
    for (const FilterDef& def : defs) map->emplace(def.name, def);
    return map;
  }();
  return *table;
}

}  // namespace

const FilterDef* find_filter(std::string_view name) {
  const auto it = filters().find(name);
  return it == filters().end() ? nullptr : &it->second;
}

bool bind_arguments(Runtime& rt, std::string_view what, const std::vector<std::string_view>& params, Arguments* args) {
  if (args->positional.size() > params.size()) {
    rt.fail(fmt::format("'{}' takes at most {} arguments", what, params.size()));
    return false;
  }
  const size_t given = args->positional.size();
  args->positional.resize(params.size(), Value::absent());
  for (auto& [name, value] : args->keyword) {
    const auto param = std::find(params.begin(), params.end(), name);
    const auto index = static_cast<size_t>(param - params.begin());
    if (param == params.end() || index < given) {
      rt.fail(fmt::format("'{}' cannot take the argument '{}'", what, name));
      return false;
    }
    args->positional[index] = std::move(value);
  }
  args->keyword.clear();
  return true;
}

Value call_filter(Runtime& rt, const FilterDef& filter, const Value& input, Arguments args) {
  const DepthGuard guard(rt);
  if (!guard.ok() || !rt.step()) return {};
  if (!filter.variadic && !bind_arguments(rt, filter.name, filter.params, &args)) return {};
  Value result = filter.apply(rt, input, args);
  return rt.failed() ? Value() : result;
}

}  // namespace tensorfold
