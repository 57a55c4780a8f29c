// Equality with the Hugging Face tokenizers library on 10,000 generated lines for each family of tokenizers.
// make_golden.py wrote the expected digests; Random and make_line here and there must stay the same.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <openssl/sha.h>

#include <boost/json.hpp>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "coordinator/tokenizer/stream_decoder.h"
#include "coordinator/tokenizer/tokenizer.h"
#include "coordinator/tokenizer/utf8.h"
#include "tests/coordinator/tokenizer/test_tokenizers.h"

namespace tensorfold {
namespace {

namespace json = boost::json;

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file.good()) << path;
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

json::value read_json(const std::string& path) { return json::parse(read_file(path)); }

std::string sha256(std::string_view text) {
  unsigned char digest[SHA256_DIGEST_LENGTH];
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest);
  return {reinterpret_cast<const char*>(digest), sizeof digest};
}

// splitmix64.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t below(uint64_t n) {
    state_ += 0x9E3779B97F4A7C15u;
    uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (z ^ (z >> 31)) % n;
  }

 private:
  uint64_t state_;
};

struct Pools {
  explicit Pools(const json::value& file) {
    for (const auto& [name, pool] : file.as_object()) {
      if (name == "ranges") {
        for (const json::value& r : pool.as_array()) ranges.emplace_back(r.at(0).as_int64(), r.at(1).as_int64());
        continue;
      }
      std::vector<std::string>& texts = fragments[std::string(name.data(), name.size())];
      for (const json::value& text : pool.as_array())
        texts.emplace_back(text.as_string().data(), text.as_string().size());
    }
    for (std::string& hex : fragments["malformed"]) {
      std::string bytes;
      for (size_t i = 0; i < hex.size(); i += 2) bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
      hex = bytes;
    }
  }
  std::map<std::string, std::vector<std::string>> fragments;
  std::vector<std::pair<int64_t, int64_t>> ranges;
};

std::string make_line(Random& random, const Pools& pools) {
  std::string out;
  const auto pick = [&](const char* name) {
    const std::vector<std::string>& pool = pools.fragments.at(name);
    out += pool[random.below(pool.size())];
  };
  const uint64_t parts = 1 + random.below(12);
  for (uint64_t part = 0; part < parts; ++part) {
    const uint64_t kind = random.below(20);
    if (kind < 9) {
      if (random.below(2) != 0) out += ' ';
      pick("words");
    } else if (kind == 9) {
      pick("code");
    } else if (kind < 13) {
      const auto [low, high] = pools.ranges[random.below(pools.ranges.size())];
      const uint64_t count = 1 + random.below(6);
      for (uint64_t i = 0; i < count; ++i) {
        append_utf8(static_cast<char32_t>(low + static_cast<int64_t>(random.below(high - low + 1))), out);
      }
    } else if (kind < 15) {
      const uint64_t count = 1 + random.below(4);
      for (uint64_t i = 0; i < count; ++i) pick("whitespace");
    } else if (kind == 15) {
      pick("special");
    } else if (kind == 16) {
      const uint64_t count = 1 + random.below(9);
      for (uint64_t i = 0; i < count; ++i) out += static_cast<char>('0' + random.below(10));
    } else if (kind == 17) {
      pick("emoji");
    } else if (kind == 18) {
      pick("controls");
    } else if (random.below(2) != 0) {
      pick("malformed");
    } else {
      const uint64_t count = 1 + random.below(5);
      for (uint64_t i = 0; i < count; ++i) append_utf8(static_cast<char32_t>(0x300 + random.below(0x70)), out);
    }
  }
  return out;
}

std::string ids_text(const std::vector<int32_t>& ids) { return fmt::format("{}", fmt::join(ids, ",")); }

EncodeOptions options_of(std::string_view mode) {
  EncodeOptions options;
  if (mode == "non_special") options.added_tokens = AddedTokens::kNonSpecial;
  if (mode == "none") options.added_tokens = AddedTokens::kNone;
  options.add_special_tokens = mode == "template";
  return options;
}

class Golden : public ::testing::Test {
 protected:
  void SetUp() override {
    header_ = read_json(data_path("golden"));
    const Pools pools(read_json(data_path("corpus")));
    Random random(header_.at("corpus_seed").to_number<uint64_t>());
    std::string all;
    for (int64_t i = 0; i < header_.at("lines").as_int64(); ++i) {
      lines_.push_back(make_line(random, pools));
      all += lines_.back();
    }
    std::string hex;
    for (const char c : sha256(all)) hex += fmt::format("{:02x}", static_cast<unsigned char>(c));
    ASSERT_EQ(hex, std::string_view(header_.at("corpus_sha256").as_string().data(), 64)) << "the corpora differ";
    digests_ = read_file(std::string(TENSORFOLD_SOURCE_DIR) + "/tests/coordinator/tokenizer/data/golden.bin");
  }

  bool matches(std::string_view text) {
    const bool same = std::memcmp(sha256(text).data(), digests_.data() + next_, 4) == 0;
    next_ += 4;
    return same;
  }

  void check_encode(const Tokenizer& tokenizer, std::string_view name, std::string_view mode) {
    size_t bytes = 0, wrong = 0;
    const auto start = std::chrono::steady_clock::now();
    for (size_t i = 0; i < lines_.size(); ++i) {
      absl::StatusOr<std::vector<int32_t>> ids = tokenizer.encode(lines_[i], options_of(mode));
      ASSERT_TRUE(ids.ok()) << ids.status();
      bytes += lines_[i].size();
      if (!matches(ids_text(*ids)) && ++wrong <= 3) {
        ADD_FAILURE() << name << " " << mode << " line " << i << ": " << json::serialize(json::value(lines_[i]))
                      << "\n  " << ids_text(*ids);
      }
    }
    EXPECT_EQ(wrong, 0u) << name << " " << mode << " lines differ of " << lines_.size();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    fmt::print("{} {}: {} bytes, {:.1f} MB/s\n", name, mode, bytes, static_cast<double>(bytes) / took.count() / 1e6);
  }

  void check_decode(const Tokenizer& tokenizer, std::string_view name) {
    Random random(header_.at("decode_seed").to_number<uint64_t>());
    for (int64_t i = 0; i < header_.at("decode_cases").as_int64(); ++i) {
      std::vector<int32_t> ids(1 + random.below(40));
      for (int32_t& id : ids)
        id = static_cast<int32_t>(random.below(static_cast<uint64_t>(tokenizer.vocab_size()) + 5));
      const std::string text = tokenizer.decode(ids, i % 2 == 1);
      EXPECT_TRUE(matches(text)) << name << " decode of " << ids_text(ids) << ": " << text;
      StreamDecoder stream(tokenizer, i % 2 == 1);
      std::string streamed;
      for (const int32_t id : ids) {
        const std::string piece = stream.push(id);
        EXPECT_TRUE(is_valid_utf8(piece));
        streamed += piece;
      }
      EXPECT_EQ(streamed + stream.flush(), text);
    }
  }

  json::value header_;
  std::vector<std::string> lines_;
  std::string digests_;
  size_t next_ = 0;
};

// Protects that every family's ids and texts are the library's, for every script, blank, lookalike and malformed byte.
TEST_F(Golden, EqualsHuggingFace) {
  for (const json::value& column : header_.at("columns").as_array()) {
    const std::string name(column.at("tokenizer").as_string());
    const std::string mode(column.at("mode").as_string());
    absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer =
        Tokenizer::load(fmt::format("{}/{}", TENSORFOLD_SOURCE_DIR, std::string(column.at("path").as_string())));
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    if (mode == "decode") {
      check_decode(**tokenizer, name);
    } else {
      check_encode(**tokenizer, name, mode);
    }
  }
  EXPECT_EQ(next_, digests_.size());
}

}  // namespace
}  // namespace tensorfold
