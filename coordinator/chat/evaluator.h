#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/chat/ast.h"
#include "coordinator/chat/value.h"

namespace tensorfold {

// Tells strftime_now the time. Called from rendering threads.
using TemplateClock = std::function<std::chrono::system_clock::time_point()>;

// Makes the variables of a rendering, whose values belong to its budget.
using TemplateVariables = std::function<std::vector<std::pair<std::string, Value>>(Runtime&)>;

// Renders a parsed template. Errors: InvalidArgument (the template fails, with its line, or raises, with its own
// message), ResourceExhausted (a limit is passed). Thread-safe.
absl::StatusOr<Text> evaluate_template(const Ast& ast, const TemplateLimits& limits, const TemplateClock& clock,
                                       const TemplateVariables& variables);

}  // namespace tensorfold
