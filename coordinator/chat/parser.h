#pragma once

#include <memory>
#include <string_view>

#include "absl/status/statusor.h"
#include "coordinator/chat/ast.h"

namespace tensorfold {

// Parses a chat template, with the grammar of jinja2 3.1 restricted to the subset in README.md. A tag, filter, test,
// method or function outside it is an InvalidArgument error that names it and its line, as is a template over the
// limits.
absl::StatusOr<std::shared_ptr<const Ast>> parse_template(std::string_view source, const TemplateLimits& limits);

}  // namespace tensorfold
