// Finds shape files (deploy/shapes) by name.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace tensorfold {

/// Folders that hold shapes, those that exist: `shapes` beside the program, `deploy/shapes` of the tree that the
/// program stands in, and that of the tree it was built from.
std::vector<std::string> shape_folders();

/// The path of a shape: `shape` itself when it is a path (has a '/' or ends in .json), else the file of that name in
/// the first folder that has one. NotFound names the shapes that there are.
absl::StatusOr<std::string> find_shape(const std::string& shape);

}  // namespace tensorfold
