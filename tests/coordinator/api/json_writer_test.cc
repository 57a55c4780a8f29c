#include "coordinator/api/json_writer.h"

#include <gtest/gtest.h>

#include <boost/json.hpp>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace tensorfold {
namespace {

// Protects "valid UTF-8 always": random bytes come out as JSON that a strict parser takes.
TEST(JsonWriter, AnyBytesGiveValidJson) {
  std::mt19937 rng(1);
  for (int i = 0; i < 3000; ++i) {
    std::string bytes;
    const size_t size = rng() % 24;
    for (size_t j = 0; j < size; ++j) {
      const char interesting[] = {'\xe2', '\x82', '\xac', '\xf0', '\x9f', '\xed',
                                  '\xa0', '\xc0', '"',    '\\',   '\0',   '\x7f'};
      bytes.push_back(rng() % 2 ? interesting[rng() % sizeof(interesting)] : static_cast<char>(rng()));
    }
    JsonWriter json;
    const std::string text = json.begin_object().field("k", bytes).end_object().take();
    ASSERT_TRUE(json_is_utf8(text));
    const boost::json::value value = boost::json::parse(text);
    if (json_is_utf8(bytes)) {
      ASSERT_EQ(std::string(value.at("k").as_string().c_str(), value.at("k").as_string().size()), bytes);
    }
  }
}

// Protects numbers: they read back exactly, and what JSON cannot say is null.
TEST(JsonWriter, Numbers) {
  JsonWriter json;
  json.begin_array().number(0.1).number(-1e-300).number(std::numeric_limits<double>::infinity());
  json.number(std::numeric_limits<double>::quiet_NaN()).unsigned_integer(18446744073709551615ull).integer(-5);
  json.number(2.0).boolean(true).null().raw("[1]").end_array();
  const boost::json::value value = boost::json::parse(json.take());
  EXPECT_EQ(value.at(0).as_double(), 0.1);
  EXPECT_EQ(value.at(1).as_double(), -1e-300);
  EXPECT_TRUE(value.at(2).is_null());
  EXPECT_TRUE(value.at(3).is_null());
  EXPECT_EQ(value.at(4).as_uint64(), 18446744073709551615ull);
  EXPECT_EQ(value.at(5).as_int64(), -5);
  EXPECT_EQ(value.at(6).to_number<double>(), 2.0);
}

// Protects commas in nested and empty containers.
TEST(JsonWriter, Structure) {
  JsonWriter json;
  json.begin_object().key("a").begin_array().end_array().key("b").begin_object().end_object().key("c");
  json.begin_array().begin_object().end_object().ids(std::vector<uint32_t>{1, 2}).bytes("\xff").string("x").end_array();
  EXPECT_EQ(json.end_object().take(), R"({"a":[],"b":{},"c":[{},[1,2],[255],"x"]})");
}

// Protects the UTF-8 rules: overlong forms, surrogates, too large, cut.
TEST(JsonUtf8, IsStrict) {
  for (const char* bad : {"\xc0\x80", "\xc1\xbf", "\xe0\x9f\xbf", "\xed\xa0\x80", "\xf0\x8f\xbf\xbf",
                          "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\x80", "\xe2\x82", "\xff"}) {
    EXPECT_FALSE(json_is_utf8(bad));
  }
  for (const char* good : {"", "a", "é", "€", "😀", "\xf4\x8f\xbf\xbf", "\xed\x9f\xbf"}) EXPECT_TRUE(json_is_utf8(good));
}

}  // namespace
}  // namespace tensorfold
