// The safetensors reader against good, broken and hostile files.
#include "worker/checkpoint/safetensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>

#include "tests/worker/checkpoint/model_copy.h"
#include "worker/checkpoint/safetensors_write.h"
#include "worker/checkpoint/tensor_values.h"

namespace tensorfold {
namespace {

using ::testing::HasSubstr;

std::string file_bytes(std::string_view header, size_t data_bytes) {
  const uint64_t length = header.size();
  std::string out(8, '\0');
  std::memcpy(out.data(), &length, 8);
  return out + std::string(header) + std::string(data_bytes, '\1');
}

absl::StatusOr<SafetensorsFile> parse(const std::string& bytes) {
  return SafetensorsFile::parse(std::as_bytes(std::span(bytes)), "f.safetensors");
}

std::string error_of(const std::string& bytes) {
  const auto file = parse(bytes);
  return file.ok() ? "no error" : std::string(file.status().message());
}

std::string header_error(std::string_view header, size_t data_bytes = 0) {
  return error_of(file_bytes(header, data_bytes));
}

std::string temp_dir() {
  static const std::string path = ModelCopy::fresh_dir("safetensors");
  return path;
}

// Protects: a good file gives names, types, shapes, bytes and metadata as written, in byte order.
TEST(Safetensors, ReadsGoodFile) {
  const std::string bytes = file_bytes(
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},)"
      R"("a\u00e9":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"e":{"dtype":"I64","shape":[0,7],"data_offsets":[16,16]}}   )",
      16);
  const auto file = parse(bytes);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_EQ(file->tensors().size(), 3u);
  EXPECT_EQ(file->tensors()[0].name, "a\xc3\xa9");
  EXPECT_EQ(file->tensors()[0].elements(), 1);
  const TensorInfo* b = file->find("b");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(b->dtype, Dtype::kBf16);
  EXPECT_EQ(b->shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(b->data.size(), 12u);
  EXPECT_EQ(file->metadata().at("format"), "pt");
  EXPECT_EQ(file->find("c"), nullptr);
}

// Protects: a file cut anywhere is an error, never a read past its end.
TEST(Safetensors, EveryTruncationIsAnError) {
  const std::string bytes = file_bytes(R"({"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[0,12]}})", 12);
  ASSERT_TRUE(parse(bytes).ok());
  for (size_t length = 0; length < bytes.size(); ++length) {
    const std::vector<char> cut(bytes.begin(), bytes.begin() + static_cast<ptrdiff_t>(length));
    const auto file = SafetensorsFile::parse(std::as_bytes(std::span(cut)), "f.safetensors");
    EXPECT_FALSE(file.ok()) << length;
  }
  EXPECT_THAT(error_of(bytes + "x"), HasSubstr("the tensors end at byte 12 of the data, but the file has 13"));
}

// Protects: the header's length is believed only up to the limit and the file's end.
TEST(Safetensors, HeaderLength) {
  std::string bytes = file_bytes("{}", 0);
  uint64_t length = 100'000'001;
  std::memcpy(bytes.data(), &length, 8);
  EXPECT_THAT(error_of(bytes), HasSubstr("header of 100000001 bytes; allowed are at most 100000000"));
  length = ~uint64_t{0};
  std::memcpy(bytes.data(), &length, 8);
  EXPECT_THAT(error_of(bytes), HasSubstr("allowed are at most"));
  length = 3;
  std::memcpy(bytes.data(), &length, 8);
  EXPECT_THAT(error_of(bytes), HasSubstr("header of 3 bytes in a file of 10 bytes"));
  EXPECT_THAT(header_error(""), HasSubstr("does not begin with '{'"));
  EXPECT_TRUE(parse(file_bytes("{}", 0)).ok());
}

// Protects: offsets must be ordered, disjoint, inside the file and without holes.
TEST(Safetensors, Offsets) {
  EXPECT_THAT(
      header_error(
          R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}})",
          7),
      HasSubstr("tensor 'b' at data_offsets [3, 7] overlaps 'a', which ends at 4"));
  EXPECT_THAT(
      header_error(
          R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
          4),
      HasSubstr("overlaps"));
  EXPECT_THAT(
      header_error(
          R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"b":{"dtype":"U8","shape":[2],"data_offsets":[5,7]}})",
          7),
      HasSubstr("bytes 4 to 5 before tensor 'b' belong to no tensor"));
  EXPECT_THAT(header_error(R"({"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}})", 4),
              HasSubstr("only 4 bytes of data"));
  EXPECT_THAT(header_error(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}})", 4),
              HasSubstr("end before they begin"));
  EXPECT_THAT(header_error(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4,8]}})", 8), HasSubstr("more than 2"));
  EXPECT_THAT(header_error(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0]}})", 4), HasSubstr("has 1 numbers"));
  EXPECT_THAT(header_error(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[-4,0]}})", 4), HasSubstr("-4"));
  EXPECT_THAT(
      header_error(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[18446744073709551612,18446744073709551615]}})", 4),
      HasSubstr("18446744073709551612"));
}

// Protects: sizes are multiplied with a check; a product that wraps to the right size is refused.
TEST(Safetensors, Shapes) {
  EXPECT_THAT(header_error(R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})"),
              HasSubstr("more than 2^63 - 1 bytes"));
  EXPECT_THAT(header_error(R"({"a":{"dtype":"F32","shape":[4611686018427387904],"data_offsets":[0,0]}})"),
              HasSubstr("more than 2^63 - 1 bytes"));
  EXPECT_THAT(header_error(R"({"a":{"dtype":"BF16","shape":[3],"data_offsets":[0,4]}})", 4),
              HasSubstr("shape [3] of BF16 is 6 bytes, but data_offsets [0, 4] hold 4"));
  EXPECT_THAT(header_error(R"({"a":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,1]}})", 1),
              HasSubstr("more than 8 dimensions"));
  EXPECT_THAT(header_error(R"({"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}})", 1), HasSubstr("-1"));
  EXPECT_THAT(header_error(R"({"a":{"dtype":"U8","shape":[1.5],"data_offsets":[0,1]}})", 1), HasSubstr("1.5"));
  EXPECT_THAT(header_error(R"({"a":{"dtype":"U8","shape":[[1]],"data_offsets":[0,1]}})", 1), HasSubstr("an array"));
}

// Protects: unknown types are named with the tensor.
TEST(Safetensors, Dtypes) {
  EXPECT_THAT(header_error(R"({"w":{"dtype":"F4","shape":[4],"data_offsets":[0,2]}})", 2),
              HasSubstr("tensor 'w': unknown dtype 'F4'; known are BOOL"));
  EXPECT_THAT(header_error(R"({"w":{"dtype":7,"shape":[4],"data_offsets":[0,2]}})", 2), HasSubstr("'dtype' is 7"));
  EXPECT_THAT(header_error(R"({"w":{"shape":[2],"data_offsets":[0,2]}})", 2), HasSubstr("has no dtype"));
}

// Protects: a repeated name, field or metadata key cannot hide another.
TEST(Safetensors, Duplicates) {
  EXPECT_THAT(
      header_error(
          R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
          2),
      HasSubstr("tensor 'a' stands twice"));
  EXPECT_THAT(header_error(R"({"a":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})", 1),
              HasSubstr("dtype stands twice"));
  EXPECT_THAT(header_error(R"({"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}})", 1),
              HasSubstr("shape stands twice"));
  EXPECT_THAT(header_error(R"({"__metadata__":{"a":"1","a":"2"}})"), HasSubstr("stands twice"));
  EXPECT_THAT(header_error(R"({"__metadata__":{},"__metadata__":{}})"), HasSubstr("stands twice"));
}

// Protects: anything outside the header's grammar is refused where it stands, at any depth and size.
TEST(Safetensors, Grammar) {
  EXPECT_THAT(header_error(R"({"a":[]})"), HasSubstr("'a' is an array"));
  EXPECT_THAT(header_error(R"({"a":null})"), HasSubstr("'a' is null"));
  EXPECT_THAT(header_error(R"({"__metadata__":{"n":1}})"), HasSubstr("allowed is a string"));
  EXPECT_THAT(header_error(R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"extra":{}}})", 1),
              HasSubstr("has a field 'extra'"));
  EXPECT_THAT(header_error(R"({"a":)"), HasSubstr("not JSON"));
  EXPECT_THAT(header_error("{}{}"), HasSubstr("f.safetensors: the header is not"));
  EXPECT_THAT(header_error("{\"\xff\":{}}"), HasSubstr("not JSON"));
  EXPECT_THAT(header_error("{\"" + std::string(5000, 'n') + "\":{}}"), HasSubstr("more than 1024 bytes"));
  EXPECT_THAT(header_error("{\"a\":" + std::string(1 << 20, '[')), HasSubstr("an array"));
  EXPECT_THAT(header_error("{\"a\":" + std::string(1 << 20, '{')), HasSubstr("f.safetensors"));
  std::string deep;
  for (int i = 0; i < 100'000; ++i) deep += "{\"a\":";
  EXPECT_THAT(header_error(deep), HasSubstr("f.safetensors"));
}

// Protects: control characters of a hostile name do not reach a terminal.
TEST(Safetensors, NamesAreQuoted) {
  EXPECT_THAT(header_error(R"({"\u001b[31m":{"dtype":"X","shape":[],"data_offsets":[0,0]}})"),
              HasSubstr("'\\x1b[31m'"));
  EXPECT_EQ(quoted_name(std::string(500, 'x')).size(), 165u);
}

// Protects: a written file is read back bit for bit, is aligned, and replaces the old one whole.
TEST(Safetensors, WriteAndRead) {
  const std::string path = temp_dir() + "/out.safetensors";
  std::vector<int64_t> ids(300);
  std::iota(ids.begin(), ids.end(), -5);
  const std::vector<float> logits = {1.5f, -0.0f, 3e-42f, 7.0f, 8.0f, 9.0f};
  const std::vector<uint16_t> halves = {0x3c00, 0x0001, 0xfbff};
  const TensorInfo half{"half", Dtype::kF16, {3}, std::as_bytes(std::span(halves))};
  for (int round = 0; round < 2; ++round) {
    const absl::Status status = write_safetensors(
        path,
        std::vector<TensorInfo>{half, tensor_view("logits", {2, 3}, logits), tensor_view("input_ids", {300}, ids)},
        {{"note", "a \"quoted\" note"}});
    ASSERT_TRUE(status.ok()) << status;
  }
  const auto file = SafetensorsFile::open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(*read_integers(*file->find("input_ids")), ids);
  EXPECT_EQ(*read_floats(*file->find("logits")), logits);
  EXPECT_EQ(*read_floats(*file->find("half")), (std::vector<float>{1.0f, 0x1p-24f, -65504.0f}));
  EXPECT_EQ(file->metadata().at("note"), "a \"quoted\" note");
  for (const TensorInfo& tensor : file->tensors()) {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor.data.data()) % static_cast<uintptr_t>(dtype_bytes(tensor.dtype)), 0u);
  }
  int entries = 0;
  for (const auto& entry : std::filesystem::directory_iterator(temp_dir()))
    entries += entry.path().string().find("out.") != std::string::npos;
  EXPECT_EQ(entries, 1);  // nothing temporary is left
}

// Protects: the writer refuses what the reader would refuse, and a folder that is not there.
TEST(Safetensors, WriteErrors) {
  const std::vector<float> two = {1, 2};
  const std::string path = temp_dir() + "/bad.safetensors";
  EXPECT_FALSE(write_safetensors(path, std::vector<TensorInfo>{tensor_view("a", {3}, two)}).ok());
  EXPECT_FALSE(
      write_safetensors(path, std::vector<TensorInfo>{tensor_view("a", {2}, two), tensor_view("a", {2}, two)}).ok());
  EXPECT_FALSE(write_safetensors(path, std::vector<TensorInfo>{tensor_view("a", {-1, -2}, two)}).ok());
  EXPECT_FALSE(std::filesystem::exists(path));
  EXPECT_FALSE(write_safetensors(temp_dir() + "/none/x.safetensors", {}).ok());
}

// Protects: what is no regular file is an error at once; a FIFO must not block.
TEST(Safetensors, OpenErrors) {
  EXPECT_TRUE(absl::IsNotFound(SafetensorsFile::open(temp_dir() + "/none").status()));
  EXPECT_FALSE(SafetensorsFile::open(temp_dir()).ok());
  const std::string fifo = temp_dir() + "/fifo";
  ::mkfifo(fifo.c_str(), 0600);
  EXPECT_FALSE(SafetensorsFile::open(fifo).ok());
  std::ofstream(temp_dir() + "/empty.safetensors").flush();
  EXPECT_FALSE(SafetensorsFile::open(temp_dir() + "/empty.safetensors").ok());
}

// Protects: half-precision values widen exactly, every one of them.
TEST(TensorValues, HalfPrecision) {
  EXPECT_EQ(float_from_f16(0x3555), 0x1.554p-2f);
  EXPECT_EQ(float_from_f16(0x8000), -0.0f);
  EXPECT_EQ(float_from_f16(0x03ff), 1023 * 0x1p-24f);
  EXPECT_TRUE(std::isinf(float_from_f16(0x7c00)));
  EXPECT_TRUE(std::isnan(float_from_f16(0x7e00)));
  EXPECT_EQ(float_from_bf16(0x3f80), 1.0f);
  for (uint32_t bits = 1; bits < 0x7c00; ++bits) {
    ASSERT_GT(float_from_f16(static_cast<uint16_t>(bits)), float_from_f16(static_cast<uint16_t>(bits - 1)));
  }
}

// Protects: numbers of a wrong type are refused by name.
TEST(TensorValues, WrongTypes) {
  const std::vector<float> values = {1, 2};
  EXPECT_FALSE(read_integers(tensor_view("f", {2}, values)).ok());
  const std::vector<int64_t> ids = {1};
  EXPECT_THAT(std::string(read_floats(tensor_view("ids", {1}, ids)).status().message()), HasSubstr("'ids' is I64"));
}

}  // namespace
}  // namespace tensorfold
