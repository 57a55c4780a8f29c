#include "worker/state/state_store.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>

namespace tensorfold {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSuffix = ".tfst";
constexpr const char* kPinSuffix = ".pin";

bool plain_name(const std::string& name) {
  return !name.empty() && name.size() <= kMaxPinName && std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
  });
}

std::string pin_path(const std::string& folder, const StateKey& key, const std::string& name) {
  return fmt::format("{}/{}.{}{}", folder, key_text(key), name, kPinSuffix);
}

void touch(const std::string& path) { ::utimensat(AT_FDCWD, path.c_str(), nullptr, 0); }

}  // namespace

std::string StateStore::folder_of(const std::string& directory, const StateOwner& owner) {
  return fmt::format("{}/{}/rank{}of{}", directory, owner.fingerprint, owner.rank, owner.world);
}

StateStore::StateStore(StateStoreOptions options)
    : options_(std::move(options)), folder_(folder_of(options_.directory, options_.owner)) {}

std::string StateStore::path_of(const StateKey& key) const {
  return fmt::format("{}/{}{}", folder_, key_text(key), kSuffix);
}

absl::StatusOr<std::unique_ptr<StateStore>> StateStore::open(StateStoreOptions options) {
  std::unique_ptr<StateStore> store(new StateStore(std::move(options)));
  std::error_code error;
  fs::create_directories(store->folder_, error);
  if (error || ::access(store->folder_.c_str(), R_OK | W_OK | X_OK) != 0) {
    return absl::PermissionDeniedError(
        fmt::format("state.directory: cannot use {}{}{}", store->folder_, error ? ": " : "", error.message()));
  }
  // Private: a state is what a conversation became.
  fs::permissions(store->folder_, fs::perms::owner_all, error);
  for (const auto& entry : fs::directory_iterator(store->folder_, error)) {
    if (entry.path().extension() == ".tmp") fs::remove(entry.path(), error);
  }
  store->thread_ = std::thread([raw = store.get()] { raw->run(); });
  return store;
}

StateStore::~StateStore() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    wake_.notify_one();
  }
  if (thread_.joinable()) thread_.join();
}

void StateStore::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    const std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    lock.lock();
  }
}

void StateStore::post(std::function<void()> job) {
  const std::lock_guard lock(mutex_);
  jobs_.push_back(std::move(job));
  wake_.notify_one();
}

void StateStore::finish(uint64_t ticket, const absl::Status& status) {
  const std::string message(status.message());
  if (!status.ok()) spdlog::warn("state on disk: {}", message);
  const std::lock_guard lock(mutex_);
  events_.push_back({ticket, status.ok(), message.substr(0, kMaxEventBytes)});
}

void StateStore::save(uint64_t ticket, StateHeader header, std::vector<std::byte> payload) {
  const size_t size = payload.size();
  {
    const std::lock_guard lock(mutex_);
    if (waiting_bytes_ + size > options_.most_waiting) {
      events_.push_back({ticket, false, "the disk is too slow: too much waits to be written"});
      return;
    }
    waiting_bytes_ += size;
  }
  auto shared = std::make_shared<std::vector<std::byte>>(std::move(payload));
  post([this, ticket, header = std::move(header), shared] {
    const std::string path = path_of(header.key);
    const absl::Status status = write_state_file(path, header, *shared);
    if (status.ok()) prune(folder_, options_.quota);
    {
      const std::lock_guard lock(mutex_);
      waiting_bytes_ -= shared->size();
    }
    finish(ticket, status);
  });
}

absl::Status StateStore::read(uint64_t ticket, const StateKey& key) {
  const std::string path = path_of(key);
  Fetched fetched;
  absl::StatusOr<StateHeader> header = read_state_file(path, &fetched.payload);
  if (!header.ok()) return header.status();
  if (!(header->owner == options_.owner) || header->key != key || header->page_bytes != options_.page_bytes) {
    return absl::InvalidArgumentError(path + ": of another build, model, rank or world");
  }
  touch(path);
  fetched.header = *std::move(header);
  const std::lock_guard lock(mutex_);
  if (waiting_bytes_ + fetched.payload.size() > options_.most_waiting) {
    return absl::ResourceExhaustedError(path + ": too much waits to be placed");
  }
  waiting_bytes_ += fetched.payload.size();
  fetched_[ticket] = std::move(fetched);
  return absl::OkStatus();
}

void StateStore::fetch(uint64_t ticket, const StateKey& key) {
  post([this, ticket, key] { finish(ticket, read(ticket, key)); });
}

absl::StatusOr<StateHeader> StateStore::take(uint64_t ticket, std::vector<std::byte>* payload) {
  const std::lock_guard lock(mutex_);
  const auto found = fetched_.find(ticket);
  if (found == fetched_.end()) return absl::NotFoundError(fmt::format("nothing was fetched for order {}", ticket));
  *payload = std::move(found->second.payload);
  waiting_bytes_ -= payload->size();
  StateHeader header = std::move(found->second.header);
  fetched_.erase(found);
  return header;
}

void StateStore::forget(uint64_t ticket) {
  // Behind the fetch, if that has not happened yet.
  post([this, ticket] {
    const std::lock_guard lock(mutex_);
    const auto found = fetched_.find(ticket);
    if (found == fetched_.end()) return;
    waiting_bytes_ -= found->second.payload.size();
    fetched_.erase(found);
  });
}

void StateStore::pin(const StateKey& key, const std::string& name) {
  post([this, key, name] {
    if (!plain_name(name)) return;
    const std::ofstream marker(pin_path(folder_, key, name));
    if (!marker) spdlog::warn("state on disk: cannot pin {} as {}", key_text(key), name);
  });
}

void StateStore::unpin(const StateKey& key, const std::string& name) {
  post([this, key, name] {
    if (plain_name(name)) ::unlink(pin_path(folder_, key, name).c_str());
  });
}

void StateStore::erase(const StateKey& key) {
  post([this, key] { ::unlink(path_of(key).c_str()); });
}

std::vector<StateEvent> StateStore::events(size_t most) {
  const std::lock_guard lock(mutex_);
  const size_t count = std::min(most, events_.size());
  const auto end = events_.begin() + static_cast<std::ptrdiff_t>(count);
  std::vector<StateEvent> out(events_.begin(), end);
  events_.erase(events_.begin(), end);
  return out;
}

std::vector<StateFileInfo> StateStore::list(const std::string& folder) {
  std::vector<StateFileInfo> files;
  std::map<std::string, std::vector<std::string>> pins;  // by key
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (entry.path().extension() == kPinSuffix && name.size() > 33) {
      pins[name.substr(0, 32)].push_back(name.substr(33, name.size() - 33 - 4));
    }
    if (entry.path().extension() != kSuffix) continue;
    StateFileInfo& file = files.emplace_back();
    file.path = entry.path().string();
    struct stat facts {};
    if (::lstat(file.path.c_str(), &facts) == 0) {
      file.bytes = static_cast<uint64_t>(facts.st_size);
      file.used = facts.st_mtim.tv_sec * 1000000000 + facts.st_mtim.tv_nsec;
    }
    absl::StatusOr<StateHeader> header = read_state_header(file.path);
    if (header.ok() && name == key_text(header->key) + kSuffix) {
      file.header = *std::move(header);
    } else {
      file.status = header.ok() ? absl::InvalidArgumentError(file.path + ": named as another state") : header.status();
    }
  }
  for (StateFileInfo& file : files) {
    const auto found = pins.find(fs::path(file.path).stem().string());
    if (found != pins.end()) file.names = found->second;
  }
  std::sort(files.begin(), files.end(), [](const StateFileInfo& a, const StateFileInfo& b) {
    return a.used != b.used ? a.used < b.used : a.header.first_position > b.header.first_position;
  });
  for (StateFileInfo& file : files) file.used /= 1000000000;
  return files;
}

int64_t StateStore::prune(const std::string& folder, int64_t quota) {
  int64_t total = 0;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const uintmax_t size = entry.file_size(error);
    if (!error && entry.path().extension() == kSuffix) total += static_cast<int64_t>(size);
  }
  if (total <= quota) return 0;
  int64_t removed = 0;
  for (const StateFileInfo& file : list(folder)) {
    if (total - removed <= quota) break;
    if (!file.names.empty() || ::unlink(file.path.c_str()) != 0) continue;
    removed += static_cast<int64_t>(file.bytes);
  }
  return removed;
}

}  // namespace tensorfold
