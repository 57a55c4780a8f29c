// Pass plans on the wire: round trips, bounds, contradictions, damage.
#include <fmt/format.h>

#include <functional>
#include <limits>

#include "tests/wire/wire_testing.h"

namespace tensorfold {
namespace {

using ::testing::HasSubstr;

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

SequencePlan small_sequence() {
  SequencePlan sequence;
  sequence.slot = 4;
  sequence.first_position = 64;
  sequence.certain = 1;
  sequence.tokens = {1, 2};
  sequence.wants = {{0, 1}, {1, 1}};
  return sequence;
}

PassPlan small_plan() {
  PassPlan plan;
  plan.sequences = {small_sequence()};
  return plan;
}

// Protects: what rank 0 decides is what every rank reads, every field and every kind of plan.
TEST(WirePlan, RoundTrips) {
  PassPlan ping;
  ping.kind = PlanKind::kPing;
  ping.release = {0, 5};
  PassPlan stop;
  stop.kind = PlanKind::kStop;
  stop.epoch = 0xFFFFFFFFu;
  stop.sequence = ~uint64_t{0};
  for (const PassPlan& plan : {sample_plan(), small_plan(), ping, stop, PassPlan()}) {
    const std::vector<std::byte> bytes = encode_plan(plan);
    const absl::StatusOr<PassPlan> decoded = decode_plan(bytes);
    ASSERT_TRUE(decoded.ok()) << decoded.status();
    EXPECT_EQ(*decoded, plan);
    EXPECT_EQ(encode_plan(*decoded), bytes);
  }
}

// Protects: the largest legal plan is not refused by mistake.
TEST(WirePlan, RoundTripsAtItsBounds) {
  PassPlan plan;
  for (uint32_t slot = 0; slot < kMaxSlots; ++slot) {
    SequencePlan sequence;
    sequence.slot = slot;
    sequence.use_mtp = true;
    sequence.first_position = uint64_t{kMaxPages} * 64 - 16;
    sequence.accepted = kMaxWindow - 1;
    sequence.certain = 1;
    sequence.tokens.assign(1, 3);
    sequence.mtp_steps = kMaxWindow - 1;
    sequence.wants = {{15, kFullRow}};
    plan.sequences.push_back(sequence);
    plan.release.push_back(slot);
  }
  ASSERT_EQ(plan.rows(), kMaxPassRows);
  const absl::StatusOr<PassPlan> decoded = decode_plan(encode_plan(plan));
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(*decoded, plan);
  EXPECT_LT(encode_plan(plan).size(), kMaxPlanBytes);
}

// Protects: the layout that docs/formats/wire.md states; a change of it must raise kPlanVersion.
TEST(WirePlan, LayoutIsTheDocumentedOne) {
  PassPlan plan;
  plan.epoch = 0x01020304;
  plan.sequence = 9;
  SequencePlan sequence;
  sequence.certain = 1;
  sequence.tokens = {77};
  sequence.wants = {{0, 1}};
  plan.sequences = {sequence};
  const std::vector<std::byte> bytes = encode_plan(plan);
  EXPECT_EQ(bytes.size(), 116u);
  const char* const magic = "TFPN";
  EXPECT_EQ(std::memcmp(bytes.data(), magic, 4), 0);
  EXPECT_EQ(bytes[4], std::byte{kPlanVersion});
  EXPECT_EQ(bytes[8], std::byte{1});
  EXPECT_EQ(bytes[9], std::byte{4});
}

struct Breach {
  const char* name;
  std::function<void(PassPlan&)> make;
  const char* reason;
  const char* second = "plan:";
};

// Protects: each bound and contradiction of a plan is refused, on both ends, with the reason and the slot or value.
TEST(WirePlan, RefusesEveryBreach) {
  const auto sequence = [](const std::function<void(SequencePlan&)>& change) {
    return [change](PassPlan& plan) { change(plan.sequences[0]); };
  };
  const std::vector<Breach> breaches = {
      {"slot", sequence([](SequencePlan& s) { s.slot = kMaxSlots; }), "slot 1024", "slots end at 1023"},
      {"no tokens", sequence([](SequencePlan& s) { s.tokens.clear(), s.wants.clear(); }), "slot 4: no tokens"},
      {"certain 0", sequence([](SequencePlan& s) { s.certain = 0; }), "0 certain of 2 tokens"},
      {"certain 3", sequence([](SequencePlan& s) { s.certain = 3; }), "3 certain of 2 tokens"},
      {"window", sequence([](SequencePlan& s) { s.tokens.assign(17, 1), s.wants.clear(); }), "16 tentative rows",
       "at most 15"},
      {"window by MTP", sequence([](SequencePlan& s) { s.use_mtp = true, s.mtp_steps = 15, s.wants.clear(); }),
       "16 tentative rows"},
      {"endless MTP", sequence([](SequencePlan& s) { s.use_mtp = true, s.mtp_steps = ~0u, s.wants.clear(); }),
       "4294967296 tentative rows"},
      {"accepted", sequence([](SequencePlan& s) { s.accepted = 16; }), "16 accepted rows"},
      {"fresh accepts", sequence([](SequencePlan& s) { s.fresh = true, s.first_position = 0, s.accepted = 1; }),
       "fresh slot without a snapshot has nothing to accept"},
      {"snapshot number", sequence([](SequencePlan& s) { s.fresh = true, s.snapshot = kMaxSnapshots; }),
       "starts from snapshot 65536"},
      {"snapshot for one that goes on", sequence([](SequencePlan& s) { s.snapshot = 1; }), "goes on and starts from"},
      {"snapshot at 0", sequence([](SequencePlan& s) { s.fresh = true, s.snapshot = 1, s.first_position = 0; }),
       "snapshot at position 0"},
      {"block drafts without a drafter", sequence([](SequencePlan& s) { s.block_drafts = 1; }),
       "drafts of a block without a block drafter"},
      {"both drafters", sequence([](SequencePlan& s) {
         s.use_mtp = s.use_block = true;
         s.mtp_steps = s.block_drafts = 1;
       }),
       "MTP steps beside drafts of a block"},
      {"endless block", sequence([](SequencePlan& s) { s.use_block = true, s.block_drafts = ~0u, s.wants.clear(); }),
       "4294967296 tentative rows"},
      {"MTP steps without MTP", sequence([](SequencePlan& s) { s.mtp_steps = 1; }), "MTP steps without MTP"},
      {"position", sequence([](SequencePlan& s) { s.first_position = uint64_t{kMaxPages} * 64 - 1; }),
       "from position 67108863", "67108864"},
      {"position that wraps", sequence([](SequencePlan& s) { s.first_position = ~uint64_t{0}; }),
       "from position 18446744073709551615"},
      {"row wanted", sequence([](SequencePlan& s) {
         s.wants = {{2, 1}};
       }),
       "row 2 wanted of 2"},
      {"rows fall", sequence([](SequencePlan& s) {
         s.wants = {{1, 1}, {0, 1}};
       }),
       "row 0 wanted after row 1"},
      {"row twice", sequence([](SequencePlan& s) {
         s.wants = {{0, 2}, {0, 2}};
       }),
       "row 0 wanted twice"},
      {"row three times", sequence([](SequencePlan& s) {
         s.wants = {{0, 1}, {0, kFullRow}, {0, 1}};
       }),
       "row 0 wanted three times"},
      {"drawn cold", sequence([](SequencePlan& s) {
         s.wants = {{0, kDrawn, 7, 0.0}};
       }),
       "row 0 drawn at temperature 0"},
      {"drawn hot", sequence([](SequencePlan& s) {
         s.wants = {{0, kDrawn, 7, std::numeric_limits<double>::infinity()}};
       }),
       "row 0 drawn at temperature inf"},
      {"no candidates", sequence([](SequencePlan& s) {
         s.wants = {{0, 0}};
       }),
       "0 candidates wanted of row 0"},
      {"candidates", sequence([](SequencePlan& s) {
         s.wants = {{0, 4097}};
       }),
       "4097 candidates", "1 to 4096"},
      {"candidates below full", sequence([](SequencePlan& s) {
         s.wants = {{0, kDrawn - 1}};
       }),
       "4294967293"},
      {"token", sequence([](SequencePlan& s) { s.tokens[1] = -1; }), "token -1"},
      {"page", sequence([](SequencePlan& s) { s.new_pages = {static_cast<int32_t>(kMaxPages)}; }), "page 1048576"},
      {"negative page", sequence([](SequencePlan& s) {
         s.new_pages = {0, -7};
       }),
       "page -7"},
      {"slot twice", [](PassPlan& p) { p.sequences.push_back(p.sequences[0]); }, "slot 4 twice"},
      {"release",
       [](PassPlan& p) {
         p.release = {0, kMaxSlots};
       },
       "slot 1024 released"},
      {"ping with rows", [](PassPlan& p) { p.kind = PlanKind::kPing; }, "ping with 1 sequences"},
      {"stop with rows", [](PassPlan& p) { p.kind = PlanKind::kStop; }, "stop with 1 sequences"},
      {"rows in all",
       [](PassPlan& p) {
         p.sequences[0].tokens.assign(kMaxPassRows, 1);
         p.sequences[0].certain = kMaxPassRows;
         p.sequences.push_back(small_sequence());
         p.sequences[1].slot = 5;
       },
       "16386 rows", "at most 16384"},
  };
  for (const Breach& breach : breaches) {
    SCOPED_TRACE(breach.name);
    PassPlan plan = small_plan();
    breach.make(plan);
    const absl::Status status = validate_plan(plan);
    EXPECT_EQ(status.code(), kInvalid);
    EXPECT_THAT(std::string(status.message()), HasSubstr(breach.reason));
    EXPECT_THAT(std::string(status.message()), HasSubstr(breach.second));
    EXPECT_REFUSED(decode_plan(encode_plan(plan)), kInvalid, HasSubstr(breach.reason));
  }
}

// Protects: orders beside passes name things that can exist, do not contradict each other, and do not depend on their
// own order.
TEST(WirePlan, RefusesOrdersThatMakeNoSense) {
  const auto save = [](const std::function<void(SaveOrder&)>& change) {
    return [change](PassPlan& plan) {
      SaveOrder& order = plan.orders.saves.emplace_back();
      order.ticket = 3, order.tokens = {1, 2}, order.pages = {4}, order.snapshot = 5, order.committed = 2;
      ASSERT_TRUE(validate_plan(plan).ok());
      change(order);
    };
  };
  const auto load = [](LoadOrder order) { return [order](PassPlan& plan) { plan.orders.loads = {order}; }; };
  const std::vector<Breach> breaches = {
      {"drop", [](PassPlan& p) { p.orders.drops = {kMaxSnapshots}; }, "snapshot 65536 dropped"},
      {"take slot",
       [](PassPlan& p) {
         p.orders.takes = {{kMaxSlots, 0}};
       },
       "snapshot of slot 1024"},
      {"take id",
       [](PassPlan& p) {
         p.orders.takes = {{0, kMaxSnapshots}};
       },
       "snapshot 65536 taken"},
      {"take twice",
       [](PassPlan& p) {
         p.orders.takes = {{0, 7}, {1, 7}};
       },
       "snapshot 7 taken twice"},
      {"copy out of range",
       [](PassPlan& p) {
         p.orders.copies = {{-1, 2}};
       },
       "page -1 copied to 2"},
      {"copy to itself",
       [](PassPlan& p) {
         p.orders.copies = {{2, 2}};
       },
       "page 2 copied to itself"},
      {"two copies",
       [](PassPlan& p) {
         p.orders.copies = {{1, 3}, {2, 3}};
       },
       "two copies into page 3"},
      {"chained copies",
       [](PassPlan& p) {
         p.orders.copies = {{1, 2}, {2, 3}};
       },
       "page 2 is copied, and copied into"},
      {"save without tokens", save([](SaveOrder& s) { s.tokens.clear(); }), "1 pages for 0 tokens in state order 3"},
      {"save of more pages", save([](SaveOrder& s) {
         s.pages = {1, 2};
       }),
       "2 pages for 2 tokens"},
      {"save of a page", save([](SaveOrder& s) { s.pages = {-4}; }), "page -4"},
      {"save off the grid", save([](SaveOrder& s) { s.first_position = 64; }), "segment at position 64"},
      {"save of a snapshot", save([](SaveOrder& s) { s.snapshot = kMaxSnapshots; }), "snapshot 65536"},
      {"save of a later snapshot", save([](SaveOrder& s) { s.committed = 3; }), "snapshot 5 at 3"},
      {"save at nothing", save([](SaveOrder& s) { s.snapshot = kNoSnapshot; }), "at 2 in state order 3"},
      {"save of a token", save([](SaveOrder& s) { s.tokens[1] = -2; }), "token -2"},
      {"fetch into pages", load({LoadStep::kFetch, 4, {}, {1}, kNoSnapshot, ""}), "order 4 has pages before"},
      {"place into a page", load({LoadStep::kPlace, 4, {}, {-1}, kNoSnapshot, ""}), "page -1 in state order 4"},
      {"place of a snapshot", load({LoadStep::kPlace, 4, {}, {}, kMaxSnapshots, ""}),
       "snapshot 65536 in state order 4"},
      {"pin of a long name", load({LoadStep::kPin, 4, {}, {}, kNoSnapshot, std::string(65, 'n')}), "name of 65 bytes"},
  };
  for (const Breach& breach : breaches) {
    SCOPED_TRACE(breach.name);
    PassPlan plan = small_plan();
    breach.make(plan);
    const absl::Status status = validate_plan(plan);
    EXPECT_EQ(status.code(), kInvalid);
    EXPECT_THAT(std::string(status.message()), HasSubstr(breach.reason));
    EXPECT_REFUSED(decode_plan(encode_plan(plan)), kInvalid, HasSubstr(breach.reason));
  }
}

// Protects: lists longer than any rank could use are refused before they are sent.
TEST(WirePlan, RefusesLongLists) {
  PassPlan releases = small_plan();
  releases.release.assign(kMaxSlots + 1, 0);
  EXPECT_THAT(std::string(validate_plan(releases).message()), HasSubstr("1025 slots released"));
  EXPECT_FALSE(decode_plan(encode_plan(releases)).ok());
  PassPlan pages = small_plan();
  pages.sequences[0].new_pages.assign(kMaxPages + 1, 0);
  EXPECT_THAT(std::string(validate_plan(pages).message()), HasSubstr("1048577 new pages"));
  EXPECT_FALSE(decode_plan(encode_plan(pages)).ok());
}

// Protects: a message of another kind, version or build is named as such, with both values.
TEST(WirePlan, RefusesOtherMagicVersionAndKind) {
  const std::vector<std::byte> bytes = encode_plan(small_plan());
  EXPECT_REFUSED(decode_plan(encode_report(sample_report())), kInvalid, HasSubstr("magic 50524654"),
                 HasSubstr("expected 4e504654"));
  EXPECT_REFUSED(decode_plan(with<uint32_t>(bytes, 4, 1)), kInvalid, HasSubstr("version 1"),
                 HasSubstr("this build speaks " + std::to_string(kPlanVersion)));
  EXPECT_REFUSED(decode_plan(with<uint8_t>(bytes, 8, 0)), kInvalid, HasSubstr("kind 0"));
  EXPECT_REFUSED(decode_plan(with<uint8_t>(bytes, 8, 4)), kInvalid, HasSubstr("kind 4"));
}

// Protects: one form for one meaning; a flag byte that is neither 0 nor 1 is damage that the checksum did not see.
TEST(WirePlan, RefusesFlagsThatAreNeitherYesNorNo) {
  const std::vector<std::byte> bytes = encode_plan(small_plan());
  for (const size_t at : {kPlanHeader + 4, kPlanHeader + 5}) {
    EXPECT_REFUSED(decode_plan(with<uint8_t>(bytes, at, 2)), kInvalid, HasSubstr("do not fit"));
  }
}

// Protects: no cut of a message is taken for a message, nor read beyond its end, even with a checksum that fits.
TEST(WirePlan, RefusesTruncationsAtEveryByte) {
  const std::vector<std::byte> bytes = encode_plan(sample_plan());
  for (size_t size = 0; size < bytes.size(); ++size) {
    // A copy of exactly this size: an address sanitizer sees any read beyond it.
    const std::vector<std::byte> cut(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
    EXPECT_FALSE(decode_plan(cut).ok()) << size;
    if (size < 16) {
      EXPECT_REFUSED(decode_plan(cut), kInvalid, HasSubstr(fmt::format("{} bytes are too few", size)));
    }
    EXPECT_TRUE(size < 8 || !decode_plan(sealed(cut)).ok()) << size;
  }
  std::vector<std::byte> longer = bytes;
  longer.resize(bytes.size() + 1);
  EXPECT_FALSE(decode_plan(longer).ok());
  EXPECT_REFUSED(decode_plan(sealed(longer)), kInvalid, HasSubstr("do not fit"));
}

// Protects: damage on the way is seen, whichever bit it hits, and is named as damage.
TEST(WirePlan, RefusesEverySingleBitFlip) {
  std::vector<std::byte> bytes = encode_plan(sample_plan());
  for (size_t bit = 0; bit < bytes.size() * 8; ++bit) {
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    EXPECT_REFUSED(decode_plan(bytes), absl::StatusCode::kDataLoss, HasSubstr("checksum"), HasSubstr("computed"));
    bytes[bit / 8] ^= std::byte{1} << (bit % 8);
  }
  EXPECT_TRUE(decode_plan(bytes).ok());
}

// Protects: a length is believed only as far as the message itself is long: nothing is allocated for a lie.
TEST(WirePlan, HostileLengthsDoNotAllocate) {
  PassPlan plan = small_plan();
  plan.sequences[0].wants.clear();
  const std::vector<std::byte> bytes = encode_plan(plan);
  const size_t tokens = kPlanHeader + 4 + 2 + 4 + 8 + 12 + 5;
  const size_t pages = tokens + 4 + 8;
  const size_t wants = pages + 4;
  for (const size_t at : {kPlanHeader - 8, kPlanHeader - 4, tokens, pages, wants}) {
    for (const uint32_t length : {1u << 10, 1u << 14, 1u << 20, 0x7FFFFFFFu, 0xFFFFFFFFu}) {
      const std::vector<std::byte> hostile = with<uint32_t>(bytes, at, length);
      reset_largest_allocation();
      EXPECT_FALSE(decode_plan(hostile).ok());
      EXPECT_LT(largest_allocation(), 4096u) << "length " << length << " at " << at;
    }
  }
}

// Protects: with a right checksum, any single changed byte gives a legal plan or an error, and a legal one is stable.
TEST(WirePlan, AnyResealedByteIsReadOrRefused) {
  const std::vector<std::byte> bytes = encode_plan(sample_plan());
  for (size_t at = 0; at + 8 < bytes.size(); ++at) {
    for (const int value : {0, 1, 2, 0x7F, 0x80, 0xFF}) {
      const std::vector<std::byte> changed = with<uint8_t>(bytes, at, static_cast<uint8_t>(value));
      const absl::StatusOr<PassPlan> plan = decode_plan(changed);
      if (!plan.ok()) continue;
      EXPECT_TRUE(validate_plan(*plan).ok());
      EXPECT_EQ(encode_plan(*plan), changed) << at;
    }
  }
}

}  // namespace
}  // namespace tensorfold
