#include "coordinator/hub/download.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "coordinator/hub/file_names.h"
#include "coordinator/hub/part_file.h"

namespace tensorfold {
namespace {

constexpr int kMaxRestarts = 3;

enum class Mode : uint8_t {
  kFresh,    // nobody has asked for it yet
  kProbing,  // its first range is under way, alone
  kRanges,
  kRestart,  // the hub's file changed: when nobody works on it any more it is fresh again
  kFinishing,
  kDone,
};

struct Item {
  HubFile file;
  std::optional<PartFile> part;
  Mode mode = Mode::kFresh;
  std::deque<size_t> todo;  // chunks
  int in_flight = 0;
  int restarts = 0;
  std::atomic<int64_t> counted{0};  // in the progress
};

// "bytes 100-199/1000".
struct ContentRange {
  uint64_t first = 0;
  uint64_t last = 0;
  uint64_t total = 0;
};

std::optional<ContentRange> parse_content_range(std::string_view text) {
  if (!text.starts_with("bytes ")) return std::nullopt;
  text.remove_prefix(6);
  ContentRange range;
  const auto number = [&](uint64_t& value, char after) {
    const auto [end, ec] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (ec != std::errc()) return false;
    text.remove_prefix(static_cast<size_t>(end - text.data()));
    if (after == '\0') return text.empty();
    if (text.empty() || text.front() != after) return false;
    text.remove_prefix(1);
    return true;
  };
  if (!number(range.first, '-') || !number(range.last, '/') || !number(range.total, '\0')) return std::nullopt;
  return range;
}

// A weak one says nothing about bytes.
bool is_strong(const std::string& etag) { return etag.size() >= 2 && etag.size() <= 512 && etag.front() == '"'; }

class Downloader {
 public:
  Downloader(const HubAccess& access, const DownloadPlan& plan, PullProgress& progress)
      : access_(access), plan_(plan), progress_(progress) {
    access_.http.stop = &stop_;
    for (const HubFile& file : plan.files) {
      items_.push_back(std::make_unique<Item>());
      items_.back()->file = file;
    }
  }

  absl::Status run() {
    std::vector<std::thread> threads;
    for (int i = 0; i < plan_.connections; ++i) threads.emplace_back([this] { work(); });
    for (std::thread& thread : threads) thread.join();
    return status_;
  }

 private:
  // One range under way, or the whole file. Belongs to one thread.
  struct Transfer {
    Item& item;
    size_t chunk;
    uint64_t have = 0;      // bytes of the range
    bool asked_if = false;  // If-Range was sent
    bool whole = false;     // the server sends the file from its beginning
    bool changed = false;   // it is another file now
  };

  void work() {
    HubFetcher fetcher(access_);
    while (Item* item = next()) {
      const absl::Status status = serve(fetcher, *item);
      if (!status.ok()) fail(status);
    }
  }

  void fail(const absl::Status& status) {
    const std::lock_guard lock(mutex_);
    if (status_.ok()) status_ = status;
    stop_ = true;
    changed_.notify_all();
  }

  // A file with something to do for one more thread; null when there will be none any more.
  Item* next() {
    std::unique_lock lock(mutex_);
    for (;;) {
      if (stop_) return nullptr;
      bool open = false;
      for (const std::unique_ptr<Item>& item : items_) {
        open |= item->mode != Mode::kDone;
        if (item->mode != Mode::kFresh && (item->mode != Mode::kRanges || item->todo.empty())) continue;
        if (item->mode == Mode::kFresh) item->mode = Mode::kProbing;
        ++item->in_flight;
        return item.get();
      }
      if (!open) return nullptr;
      changed_.wait(lock);
    }
  }

  absl::Status serve(HubFetcher& fetcher, Item& item) {
    std::optional<size_t> chunk;
    {
      const std::lock_guard lock(mutex_);
      if (item.mode == Mode::kProbing) {
        if (absl::Status status = prepare(item); !status.ok()) return status;
      }
      if (!item.todo.empty() && item.mode != Mode::kRestart) {
        chunk = item.todo.front();
        item.todo.pop_front();
      }
    }
    if (chunk) {
      Transfer transfer{item, *chunk};
      if (absl::Status status = fetch(fetcher, transfer); !status.ok()) return status;
      const std::lock_guard lock(mutex_);
      if (absl::Status status = account(transfer); !status.ok()) return status;
    }
    return leave(item);
  }

  absl::Status prepare(Item& item) {
    if (!item.part) {
      absl::StatusOr<PartFile> part = PartFile::open(plan_.staging, item.file, plan_.chunk_bytes);
      if (!part.ok()) return part.status();
      item.part.emplace(std::move(*part));
      count(item, static_cast<int64_t>(item.part->done_bytes()));
    }
    item.todo.clear();
    for (size_t i = 0; i < item.part->chunks(); ++i) {
      if (!item.part->done(i)) item.todo.push_back(i);
    }
    return absl::OkStatus();
  }

  void count(Item& item, int64_t bytes) {
    item.counted += bytes;
    progress_.found(bytes);
  }

  absl::Status fetch(HubFetcher& fetcher, Transfer& transfer) {
    const std::string target = content_target(plan_.repository, plan_.commit, transfer.item.file.path);
    return fetcher.with_attempts([&] { return attempt(fetcher, target, transfer); },
                                 // What a reply from the beginning brought is lost with it.
                                 [&] { return transfer.whole ? 0 : transfer.have; });
  }

  absl::Status attempt(HubFetcher& fetcher, const std::string& target, Transfer& transfer) {
    const PartFile& part = *transfer.item.part;
    const uint64_t begin = part.begin(transfer.chunk);
    const uint64_t end = part.end(transfer.chunk);
    if (transfer.whole) {  // the last attempt's
      count(transfer.item, -static_cast<int64_t>(transfer.have));
      transfer.whole = false;
      transfer.have = 0;
    }
    HttpHeaders headers = {{"Range", fmt::format("bytes={}-{}", begin + transfer.have, end - 1)}};
    {
      const std::lock_guard lock(mutex_);
      transfer.asked_if = is_strong(part.etag());
      if (transfer.asked_if) headers.emplace_back("If-Range", part.etag());
    }
    const absl::Status status = fetcher.get(
        target, headers, shown(transfer.item.file.path),
        [&](const HttpHead& head) { return begin_body(transfer, head); },
        [&](std::span<const char> bytes) { return take(transfer, bytes); });
    if (!status.ok() || transfer.changed) return status;
    const uint64_t wanted = transfer.whole ? transfer.item.file.size : end - begin;
    if (transfer.have != wanted) {
      return absl::UnavailableError(fmt::format("{}: the reply ended after {} of {} bytes",
                                                shown(transfer.item.file.path), transfer.have, wanted));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<bool> begin_body(Transfer& transfer, const HttpHead& head) {
    Item& item = transfer.item;
    const std::lock_guard lock(mutex_);
    if (head.status == 206) {
      const uint64_t first = item.part->begin(transfer.chunk) + transfer.have;
      const uint64_t last = item.part->end(transfer.chunk) - 1;
      const std::optional<ContentRange> range = parse_content_range(head.content_range);
      if (!range || range->first != first || range->last != last || range->total != item.file.size) {
        return absl::InvalidArgumentError(fmt::format("{}: asked for bytes {} to {} of {}, the server sends '{}'",
                                                      shown(item.file.path), first, last, item.file.size,
                                                      head.content_range.substr(0, 80)));
      }
      if (item.part->etag().empty()) item.part->set_etag(head.etag);
      if (item.mode == Mode::kProbing) {
        item.mode = Mode::kRanges;
        changed_.notify_all();
      }
      return true;
    }
    if (transfer.asked_if || item.mode != Mode::kProbing) {
      transfer.changed = true;
      return false;
    }
    if (head.content_length && *head.content_length != item.file.size) {
      return absl::DataLossError(fmt::format("{}: the hub lists {} bytes, the server sends {}", shown(item.file.path),
                                             item.file.size, *head.content_length));
    }
    transfer.whole = true;
    transfer.have = 0;
    return true;
  }

  absl::Status take(Transfer& transfer, std::span<const char> bytes) {
    const PartFile& part = *transfer.item.part;
    const uint64_t begin = transfer.whole ? 0 : part.begin(transfer.chunk);
    const uint64_t end = transfer.whole ? transfer.item.file.size : part.end(transfer.chunk);
    if (bytes.size() > end - begin - transfer.have) {
      return absl::DataLossError(
          fmt::format("{}: the server sends more bytes than it announced", shown(transfer.item.file.path)));
    }
    if (absl::Status status = part.write(begin + transfer.have, bytes); !status.ok()) return status;
    transfer.have += bytes.size();
    transfer.item.counted += static_cast<int64_t>(bytes.size());
    progress_.received(bytes.size());
    return absl::OkStatus();
  }

  // Under the lock: what a transfer that ended well means for its file.
  absl::Status account(Transfer& transfer) {
    Item& item = transfer.item;
    if (transfer.changed) {
      item.mode = Mode::kRestart;
      return absl::OkStatus();
    }
    if (item.mode == Mode::kRestart) return absl::OkStatus();  // of the old file
    if (!transfer.whole) return item.part->mark_done(transfer.chunk);
    item.todo.clear();
    return item.part->mark_all_done();
  }

  absl::Status leave(Item& item) {
    {
      const std::lock_guard lock(mutex_);
      --item.in_flight;
      if (item.in_flight > 0) return absl::OkStatus();
      if (item.mode == Mode::kRestart) return restart(item);
      if (!item.part->complete()) return absl::OkStatus();
      item.mode = Mode::kFinishing;
    }
    if (absl::Status status = item.part->finish(&stop_); !status.ok()) return status;
    const std::lock_guard lock(mutex_);
    item.part.reset();
    item.mode = Mode::kDone;
    changed_.notify_all();
    return absl::OkStatus();
  }

  absl::Status restart(Item& item) {
    if (++item.restarts > kMaxRestarts) {
      return absl::DataLossError(
          fmt::format("{}: the server's file changes again and again while it is fetched", shown(item.file.path)));
    }
    progress_.say(fmt::format("{}: the server has another file of that name than before, so it is fetched anew",
                              shown(item.file.path)));
    count(item, -item.counted);
    item.mode = Mode::kFresh;
    changed_.notify_all();
    return item.part->reset();
  }

  HubAccess access_;
  const DownloadPlan& plan_;
  PullProgress& progress_;
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::unique_ptr<Item>> items_;
  absl::Status status_;
};

}  // namespace

absl::Status download(const HubAccess& access, const DownloadPlan& plan, PullProgress& progress) {
  Downloader downloader(access, plan, progress);
  return downloader.run();
}

}  // namespace tensorfold
