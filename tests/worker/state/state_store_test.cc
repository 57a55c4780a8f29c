// States on disk: what is written comes back, and nothing else is ever believed.
#include "worker/state/state_store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>

namespace tensorfold {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

StateOwner owner() { return {.build = "0.1.0", .fingerprint = "00112233445566aa", .rank = 1, .world = 2}; }

StateHeader sample_header(int32_t seed = 1, size_t tokens = 100) {
  StateHeader header;
  header.owner = owner();
  header.first_position = 2048;
  for (size_t i = 0; i < tokens; ++i) header.tokens.push_back(seed * 7 + static_cast<int32_t>(i));
  header.parent = {3, 4};
  header.committed = header.first_position + tokens - 3;
  header.key = state_key(header.owner.fingerprint, header.parent, header.tokens, header.committed);
  header.mtp = true;
  header.kept = {5, 6, 7};
  header.page_bytes = 192;
  header.snapshot_bytes = 333;
  return header;
}

std::vector<std::byte> sample_payload(const StateHeader& header) {
  std::vector<std::byte> payload(header.payload_bytes());
  for (size_t i = 0; i < payload.size(); ++i) payload[i] = static_cast<std::byte>(i * 31 + i / 7);
  return payload;
}

std::vector<char> read_bytes(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_bytes(const std::string& path, const std::vector<char>& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

class StateStoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    root_ = fs::temp_directory_path() / ("tensorfold-state-" + std::to_string(::getpid()) + "-" +
                                         ::testing::UnitTest::GetInstance()->current_test_info()->name());
    fs::remove_all(root_);
    fs::create_directories(root_);
  }
  void TearDown() override { fs::remove_all(root_); }

  std::unique_ptr<StateStore> open(int64_t quota = 1 << 30) {
    StateStoreOptions options;
    options.directory = root_;
    options.owner = owner();
    options.quota = quota;
    options.page_bytes = 192;
    absl::StatusOr<std::unique_ptr<StateStore>> store = StateStore::open(options);
    EXPECT_TRUE(store.ok()) << store.status();
    return store.ok() ? *std::move(store) : nullptr;
  }
  static StateEvent wait_event(StateStore& store) {
    for (int i = 0; i < 5000; ++i) {
      const std::vector<StateEvent> events = store.events(1);
      if (!events.empty()) return events[0];
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    ADD_FAILURE() << "no event within ten seconds";
    return {};
  }
  std::string folder() const { return StateStore::folder_of(root_, owner()); }
  std::string file_of(const StateHeader& header) const { return folder() + "/" + key_text(header.key) + ".tfst"; }

  fs::path root_;
};

// Protects: a state comes back bit for bit, also in another process's store, with no unfinished file beside it.
TEST_F(StateStoreTest, ComesBackAfterARestart) {
  const StateHeader header = sample_header();
  {
    const auto store = open();
    store->save(7, header, sample_payload(header));
    EXPECT_EQ(wait_event(*store), (StateEvent{7, true, ""}));
  }
  write_bytes(folder() + "/half.123.tmp", {'x'});
  const auto store = open();
  EXPECT_FALSE(fs::exists(folder() + "/half.123.tmp")) << "what a killed process left is removed";
  store->fetch(8, header.key);
  EXPECT_EQ(wait_event(*store), (StateEvent{8, true, ""}));
  std::vector<std::byte> payload;
  const absl::StatusOr<StateHeader> found = store->take(8, &payload);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(*found, header);
  EXPECT_EQ(payload, sample_payload(header));
  EXPECT_FALSE(store->take(8, &payload).ok()) << "taken once";
}

// Protects: a file that is cut anywhere, longer, or changed in any byte is reported and not used.
TEST_F(StateStoreTest, DamageIsSeenInEveryByte) {
  const StateHeader header = sample_header(1, 20);
  const std::string path = root_ / "state";
  ASSERT_TRUE(write_state_file(path, header, sample_payload(header)).ok());
  const std::vector<char> bytes = read_bytes(path);
  std::vector<std::byte> payload;
  ASSERT_TRUE(read_state_file(path, &payload).ok());
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::vector<char> changed = bytes;
    changed[i] = static_cast<char>(changed[i] ^ 0x10);
    write_bytes(path, changed);
    EXPECT_FALSE(read_state_file(path, &payload).ok()) << "byte " << i;
    changed.resize(i);
    write_bytes(path, changed);
    EXPECT_FALSE(read_state_file(path, &payload).ok()) << "cut at " << i;
    EXPECT_FALSE(i < 100 && read_state_header(path).ok()) << "header cut at " << i;
  }
  std::vector<char> longer = bytes;
  longer.push_back(0);
  write_bytes(path, longer);
  EXPECT_FALSE(read_state_file(path, &payload).ok());
  write_bytes(path, bytes);
  EXPECT_TRUE(read_state_file(path, &payload).ok());
}

// Protects: a whole file of somebody else is not used: another build, fingerprint, rank, world, page size or name.
TEST_F(StateStoreTest, ForeignFilesAreRefused) {
  const auto store = open();
  uint64_t ticket = 1;
  const auto refused = [&](const std::function<void(StateHeader&)>& change) {
    StateHeader header = sample_header();
    const std::string path = file_of(header);
    change(header);
    EXPECT_TRUE(write_state_file(path, header, sample_payload(header)).ok());
    store->fetch(++ticket, sample_header().key);
    const StateEvent event = wait_event(*store);
    EXPECT_EQ(event.ticket, ticket);
    EXPECT_FALSE(event.ok);
    EXPECT_THAT(event.message, HasSubstr("of another build, model, rank or world"));
  };
  refused([](StateHeader& h) { h.owner.build = "0.2.0"; });
  refused([](StateHeader& h) { h.owner.fingerprint = "ffffffffffffffff"; });
  refused([](StateHeader& h) { h.owner.rank = 0; });
  refused([](StateHeader& h) { h.owner.world = 3; });
  refused([](StateHeader& h) { h.page_bytes = 128; });
  refused([](StateHeader& h) { h.key.low ^= 1; });
  store->fetch(100, {9, 9});
  const StateEvent missing = wait_event(*store);
  EXPECT_FALSE(missing.ok);
  EXPECT_THAT(missing.message, HasSubstr("No such file"));
}

// Protects: the quota holds, the least recently used go first, and what is pinned stays whatever comes.
TEST_F(StateStoreTest, QuotaForgetsTheLeastRecentlyUsed) {
  std::vector<StateHeader> headers;
  for (int32_t i = 0; i < 4; ++i) headers.push_back(sample_header(i + 1));
  ASSERT_TRUE(open() != nullptr);
  ASSERT_TRUE(write_state_file(file_of(headers[0]), headers[0], sample_payload(headers[0])).ok());
  const int64_t size = static_cast<int64_t>(fs::file_size(file_of(headers[0])));
  const auto store = open(2 * size);
  const auto save = [&](size_t i) {
    store->save(i, headers[i], sample_payload(headers[i]));
    EXPECT_TRUE(wait_event(*store).ok);
  };
  store->pin(headers[0].key, "manual");
  save(1);
  save(2);
  EXPECT_TRUE(fs::exists(file_of(headers[0]))) << "pinned";
  EXPECT_FALSE(fs::exists(file_of(headers[1])));
  EXPECT_TRUE(fs::exists(file_of(headers[2])));
  store->unpin(headers[0].key, "manual");
  save(3);
  EXPECT_FALSE(fs::exists(file_of(headers[0])));
  EXPECT_TRUE(fs::exists(file_of(headers[3])));
  store->erase(headers[3].key);
  store->fetch(9, headers[3].key);
  EXPECT_FALSE(wait_event(*store).ok);
}

// Protects: what waits for a slow disk, or to be placed, is bounded; more is refused with an event, never dropped
// silently.
TEST_F(StateStoreTest, WaitingBytesAreBounded) {
  const StateHeader header = sample_header();
  StateStoreOptions options;
  options.directory = root_;
  options.owner = owner();
  options.quota = 1 << 30;
  options.page_bytes = 192;
  options.most_waiting = header.payload_bytes() - 1;
  ASSERT_TRUE(write_state_file(
                  [&] {
                    fs::create_directories(folder());
                    return file_of(header);
                  }(),
                  header, sample_payload(header))
                  .ok());
  auto store = *StateStore::open(options);
  store->save(1, header, sample_payload(header));
  StateEvent event = wait_event(*store);
  EXPECT_FALSE(event.ok);
  EXPECT_THAT(event.message, HasSubstr("too slow"));
  store->fetch(2, header.key);
  event = wait_event(*store);
  EXPECT_FALSE(event.ok);
  EXPECT_THAT(event.message, HasSubstr("waits to be placed"));
}

// Protects: a listing names every file with what is wrong with it, and never fails on one.
TEST_F(StateStoreTest, ListsGoodAndBadFiles) {
  const auto store = open();
  const StateHeader header = sample_header();
  ASSERT_TRUE(write_state_file(file_of(header), header, sample_payload(header)).ok());
  write_bytes(folder() + "/0123.tfst", {'n', 'o'});
  store->pin(header.key, "manual");
  store->fetch(1, header.key);
  EXPECT_TRUE(wait_event(*store).ok);
  const std::vector<StateFileInfo> files = StateStore::list(folder());
  ASSERT_EQ(files.size(), 2u);
  for (const StateFileInfo& file : files) {
    EXPECT_EQ(file.status.ok(), file.path == file_of(header)) << file.status;
    if (file.status.ok()) {
      EXPECT_EQ(file.header, header);
      EXPECT_EQ(file.names, std::vector<std::string>{"manual"});
    }
  }
}

// Protects: keys are of fingerprint, all tokens before, these tokens and the snapshot's place, and are read back.
TEST(StateKeys, DependOnAllThatMatters) {
  const std::vector<int32_t> tokens = {1, 2, 3};
  const StateKey key = state_key("aa", {1, 2}, tokens, 3);
  EXPECT_NE(key, state_key("ab", {1, 2}, tokens, 3));
  EXPECT_NE(key, state_key("aa", {1, 3}, tokens, 3));
  EXPECT_NE(key, state_key("aa", {1, 2}, std::vector<int32_t>{1, 2}, 3));
  EXPECT_NE(key, state_key("aa", {1, 2}, tokens, 2));
  EXPECT_EQ(*parse_key(key_text(key)), key);
  for (const char* text : {"", "12", "zz112233445566778899aabbccddeeff", "../../../../../../../etc/passwdx"}) {
    EXPECT_FALSE(parse_key(text).ok()) << text;
  }
}

}  // namespace
}  // namespace tensorfold
