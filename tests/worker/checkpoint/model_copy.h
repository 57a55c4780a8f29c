// A fixture's tensors in memory, to be changed and written as another checkpoint.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/safetensors_write.h"
#include "worker/checkpoint/tensor_values.h"

namespace tensorfold {

inline const std::string kFixtures = TENSORFOLD_SOURCE_DIR "/tests/fixtures/";
inline const std::string kSprout = TENSORFOLD_SOURCE_DIR "/deploy/models/sprout";

struct OwnedTensor {
  std::string name;
  Dtype dtype;
  std::vector<int64_t> shape;
  std::vector<std::byte> bytes;

  /// Replaces the values by fp32 ones.
  void set_floats(const std::vector<float>& values) {
    dtype = Dtype::kF32;
    bytes.resize(values.size() * 4);
    std::memcpy(bytes.data(), values.data(), bytes.size());
  }
  TensorInfo view() const { return {name, dtype, shape, bytes}; }
};

class ModelCopy {
 public:
  std::vector<OwnedTensor> tensors;
  std::string config;

  static ModelCopy of(const std::string& dir) {
    ModelCopy copy;
    const auto file = SafetensorsFile::open(dir + "/model.safetensors");
    EXPECT_TRUE(file.ok()) << file.status();
    for (const TensorInfo& t : file->tensors()) {
      copy.tensors.push_back({t.name, t.dtype, t.shape, {t.data.begin(), t.data.end()}});
    }
    std::ifstream in(dir + "/config.json");
    copy.config.assign(std::istreambuf_iterator<char>(in), {});
    return copy;
  }

  OwnedTensor& at(const std::string& name) {
    for (OwnedTensor& tensor : tensors) {
      if (tensor.name == name) return tensor;
    }
    ADD_FAILURE() << "no tensor " << name;
    return tensors.front();
  }

  void replace_in_config(const std::string& from, const std::string& to) {
    const size_t at = config.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    config.replace(at, from.size(), to);
  }

  void write_part(const std::string& path, size_t first, size_t count) const {
    std::vector<TensorInfo> views;
    for (size_t i = first; i < first + count; ++i) views.push_back(tensors[i].view());
    const absl::Status status = write_safetensors(path, views);
    ASSERT_TRUE(status.ok()) << status;
  }

  /// Writes a fresh folder and returns its path.
  std::string write(const std::string& name) const {
    const std::string dir = fresh_dir(name);
    std::ofstream(dir + "/config.json") << config;
    write_part(dir + "/model.safetensors", 0, tensors.size());
    return dir;
  }

  /// An empty folder that goes away with the test program.
  static std::string fresh_dir(const std::string& name) {
    static const TemporaryRoot root;
    const std::string dir = root.path + "/" + name;
    std::filesystem::remove_all(dir);
    std::filesystem::create_directories(dir);
    return dir;
  }

 private:
  struct TemporaryRoot {
    std::string path = ::testing::TempDir() + "tensorfold_checkpoint_" + std::to_string(::getpid());
    ~TemporaryRoot() {
      std::error_code ignored;
      std::filesystem::remove_all(path, ignored);
    }
  };
};

}  // namespace tensorfold
