// Pass reports on the wire: round trips, bounds, damage.
#include <fmt/format.h>

#include <bit>

#include "tests/wire/wire_testing.h"

namespace tensorfold {
namespace {

using ::testing::HasSubstr;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

// Protects: what a rank found is what rank 0 reads, bit for bit, infinities, zeros' signs and NaN payloads included.
TEST(WireReport, RoundTrips) {
  PassReport failed;
  failed.error = "slot 3: position 7, expected 9";
  PassReport empty_rows;
  empty_rows.rows.resize(3);
  for (const PassReport& report : {sample_report(), failed, empty_rows, PassReport()}) {
    const std::vector<std::byte> bytes = encode_report(report);
    const absl::StatusOr<PassReport> decoded = decode_report(bytes);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(*decoded, report);
    EXPECT_EQ(encode_report(*decoded), bytes);
  }
  PassReport nan;
  nan.rows.resize(1);
  nan.rows[0].logits = {std::bit_cast<float>(0x7FC12345u), -0.0f};
  const absl::StatusOr<PassReport> decoded = decode_report(encode_report(nan));
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(std::bit_cast<uint32_t>(decoded->rows[0].logits[0]), 0x7FC12345u);
  EXPECT_EQ(std::bit_cast<uint32_t>(decoded->rows[0].logits[1]), 0x80000000u);
}

// Protects: the layout that docs/formats/wire.md states.
TEST(WireReport, LayoutIsTheDocumentedOne) {
  const std::vector<std::byte> bytes = encode_report(PassReport());
  EXPECT_EQ(bytes.size(), kReportHeader + 4 + 4 + 4 + 8);
  EXPECT_EQ(std::memcmp(bytes.data(), "TFRP", 4), 0);
  EXPECT_EQ(bytes[4], std::byte{kPlanVersion});
}

// Protects: an error text of any length arrives, cut at its bound.
TEST(WireReport, LongErrorsAreCut) {
  PassReport report;
  report.error.assign(10000, 'x');
  const absl::StatusOr<PassReport> decoded = decode_report(encode_report(report));
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->error, std::string(4096, 'x'));
}

// Protects: more rows than a pass can have, and longer texts, are refused.
TEST(WireReport, RefusesItsBounds) {
  const std::vector<std::byte> bytes = encode_report(PassReport());
  EXPECT_REFUSED(decode_report(with<uint32_t>(bytes, kReportHeader + 8, kMaxPassRows + 1)), kInvalid,
                 HasSubstr("pass report: 16385 rows"));
  PassReport report;
  report.error.assign(4096, 'x');
  std::vector<std::byte> longer = encode_report(report);
  longer.insert(longer.begin() + kReportHeader + 4, std::byte{'x'});
  EXPECT_REFUSED(decode_report(with<uint32_t>(longer, kReportHeader, 4097)), kInvalid, HasSubstr("do not fit"));
}

// Protects: a message of another kind or version is named as such, with both values.
TEST(WireReport, RefusesOtherMagicAndVersion) {
  const std::vector<std::byte> bytes = encode_report(sample_report());
  EXPECT_REFUSED(decode_report(encode_plan(sample_plan())), kInvalid, HasSubstr("magic 4e504654"),
                 HasSubstr("expected 50524654"));
  EXPECT_REFUSED(decode_report(with<uint32_t>(bytes, 4, 9)), kInvalid, HasSubstr("version 9"),
                 HasSubstr("this build speaks " + std::to_string(kPlanVersion)));
}

// Protects: no cut of a message is taken for a message, nor read beyond its end, even with a checksum that fits.
TEST(WireReport, RefusesTruncationsAtEveryByte) {
  const std::vector<std::byte> bytes = encode_report(sample_report());
  for (size_t size = 0; size < bytes.size(); ++size) {
    const std::vector<std::byte> cut(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
    EXPECT_FALSE(decode_report(cut).ok()) << size;
    if (size < 16) {
      EXPECT_REFUSED(decode_report(cut), kInvalid, HasSubstr(fmt::format("{} bytes are too few", size)));
    }
    EXPECT_TRUE(size < 8 || !decode_report(sealed(cut)).ok()) << size;
  }
  std::vector<std::byte> longer = bytes;
  longer.resize(bytes.size() + 1);
  EXPECT_REFUSED(decode_report(sealed(longer)), kInvalid, HasSubstr("do not fit"));
}

// Protects: damage on the way is seen, whichever bit it hits, and is named as damage.
TEST(WireReport, RefusesEverySingleBitFlip) {
  std::vector<std::byte> bytes = encode_report(sample_report());
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_REFUSED(decode_report(bytes), absl::StatusCode::kDataLoss, HasSubstr("checksum"), HasSubstr("computed"));
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
  }
  EXPECT_TRUE(decode_report(bytes).ok());
}

// Protects: a length is believed only as far as the message itself is long: nothing is allocated for a lie.
TEST(WireReport, HostileLengthsDoNotAllocate) {
  PassReport report;
  report.rows.resize(1);
  const std::vector<std::byte> bytes = encode_report(report);
  const size_t candidates = kReportHeader + 4 + 4 + 4 + 12;
  for (const size_t at : {kReportHeader, kReportHeader + 4, kReportHeader + 8, candidates, candidates + 4}) {
    for (const uint32_t length : {1u << 10, 1u << 14, 1u << 24, 0x7FFFFFFFu, 0xFFFFFFFFu}) {
      const std::vector<std::byte> hostile = with<uint32_t>(bytes, at, length);
      reset_largest_allocation();
      EXPECT_FALSE(decode_report(hostile).ok());
      EXPECT_LT(largest_allocation(), 4096u) << "length " << length << " at " << at;
    }
  }
}

}  // namespace
}  // namespace tensorfold
