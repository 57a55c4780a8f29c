#include "coordinator/commands/bench/shape_files.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <filesystem>
#include <set>

#include "worker/checkpoint/safetensors.h"

namespace tensorfold {
namespace {

namespace fs = std::filesystem;
constexpr int kLevels = 5;  // from the program up to the root of its tree
constexpr int kMostFiles = 1000;

std::set<std::string> shapes_in(const std::vector<std::string>& folders) {
  std::set<std::string> names;
  for (const std::string& folder : folders) {
    std::error_code ec;
    int files = 0;
    for (fs::directory_iterator at(folder, ec), end; !ec && at != end && ++files < kMostFiles; at.increment(ec)) {
      if (at->path().extension() == ".json") names.insert(at->path().stem().string());
    }
  }
  return names;
}

}  // namespace

std::vector<std::string> shape_folders() {
  std::vector<std::string> folders;
  const auto add = [&](const fs::path& folder) {
    std::error_code ec;
    if (fs::is_directory(folder, ec)) folders.push_back(folder.string());
  };
  std::error_code ec;
  fs::path at = fs::read_symlink("/proc/self/exe", ec).parent_path();
  if (!ec) {
    add(at / "shapes");
    for (int level = 0; level < kLevels && at.has_relative_path(); ++level, at = at.parent_path()) {
      add(at / "deploy" / "shapes");
    }
  }
  add(TENSORFOLD_SHAPES_DIR);
  return folders;
}

absl::StatusOr<std::string> find_shape(const std::string& shape) {
  std::error_code ec;
  if (shape.find('/') != std::string::npos || shape.ends_with(".json")) {
    if (fs::is_regular_file(shape, ec)) return shape;
    return absl::NotFoundError(fmt::format("--shape {}: no such file", quoted_name(shape)));
  }
  const std::vector<std::string> folders = shape_folders();
  for (const std::string& folder : folders) {
    const fs::path path = fs::path(folder) / (shape + ".json");
    if (fs::is_regular_file(path, ec)) return path.string();
  }
  const std::set<std::string> names = shapes_in(folders);
  if (names.empty()) {
    return absl::NotFoundError(
        fmt::format("--shape {}: no folder of shapes was found; give a shape file by its path", quoted_name(shape)));
  }
  return absl::NotFoundError(fmt::format("--shape {}: there are {}; any other shape file goes by its path",
                                         quoted_name(shape), fmt::join(names, ", ")));
}

}  // namespace tensorfold
