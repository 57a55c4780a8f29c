#include "coordinator/hub/part_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <boost/json/parse.hpp>
#include <boost/json/serialize.hpp>
#include <boost/json/value.hpp>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iterator>

#include "coordinator/hub/digest.h"
#include "coordinator/hub/file_names.h"
#include "coordinator/hub/folder.h"

namespace tensorfold {
namespace {

namespace json = boost::json;

constexpr std::streamsize kMaxState = 4 << 20;

struct State {
  std::string identity;
  uint64_t chunk_bytes = 0;
  std::string etag;
  std::string done;  // '1' and '0', one a chunk
  bool complete = false;
};

std::string text_at(const json::object& object, const char* key) {
  const json::value* value = object.if_contains(key);
  if (value == nullptr || !value->is_string()) return {};
  return {value->get_string().data(), value->get_string().size()};
}

// A damaged state is as good as none: the file is fetched anew.
State load_state(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::string text(static_cast<size_t>(kMaxState), '\0');
  in.read(text.data(), kMaxState);
  text.resize(static_cast<size_t>(std::max<std::streamsize>(0, in.gcount())));
  json::error_code error;
  const json::value value = json::parse(text, error);
  if (error || !value.is_object()) return {};
  const json::object& object = value.get_object();
  State state;
  state.identity = text_at(object, "contents");
  state.etag = text_at(object, "etag");
  state.done = text_at(object, "done");
  const json::value* chunk = object.if_contains("chunk_bytes");
  if (chunk != nullptr && chunk->is_int64() && chunk->get_int64() > 0) {
    state.chunk_bytes = static_cast<uint64_t>(chunk->get_int64());
  }
  const json::value* complete = object.if_contains("complete");
  state.complete = complete != nullptr && complete->is_bool() && complete->get_bool();
  return state;
}

bool has_size(const std::string& path, uint64_t size) {
  struct stat info {};
  return lstat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) && static_cast<uint64_t>(info.st_size) == size;
}

}  // namespace

absl::StatusOr<PartFile> PartFile::open(const std::string& staging, const HubFile& file, uint64_t chunk_bytes) {
  PartFile part;
  part.file_ = file;
  part.path_ = staging + "/" + file.path;
  part.size_ = file.size;
  part.chunk_bytes_ = chunk_bytes;
  const size_t chunks = (file.size + chunk_bytes - 1) / chunk_bytes;
  part.done_.assign(chunks, false);
  const State state = load_state(part.path_ + ".state");
  const bool same = !state.complete && state.identity == content_identity(file) && state.chunk_bytes == chunk_bytes &&
                    state.done.size() == chunks && has_size(part.path_ + ".part", file.size);
  if (same) {
    for (size_t i = 0; i < chunks; ++i) part.done_[i] = state.done[i] == '1';
    part.etag_ = state.etag;
  }
  part.fd_ = Descriptor(::open((part.path_ + ".part").c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0644));
  if (!part.fd_.ok()) return disk_error(part.path_ + ".part", errno);
  if (!same) {
    if (ftruncate(part.fd_.get(), 0) != 0 || ftruncate(part.fd_.get(), static_cast<off_t>(file.size)) != 0) {
      return disk_error(part.path_ + ".part", errno);
    }
    // The room is taken now rather than found missing hours later; not every file system can.
    if (file.size > 0 && fallocate(part.fd_.get(), 0, 0, static_cast<off_t>(file.size)) != 0 && errno == ENOSPC) {
      return disk_error(part.path_ + ".part", ENOSPC);
    }
    if (absl::Status status = part.save(false); !status.ok()) return status;
  }
  return part;
}

uint64_t PartFile::done_bytes() const {
  uint64_t bytes = 0;
  for (size_t i = 0; i < done_.size(); ++i) bytes += done_[i] ? end(i) - begin(i) : 0;
  return bytes;
}

bool PartFile::complete() const {
  return std::all_of(done_.begin(), done_.end(), [](bool done) { return done; });
}

absl::Status PartFile::write(uint64_t offset, std::span<const char> bytes) const {
  while (!bytes.empty()) {
    const ssize_t written = pwrite(fd_.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return disk_error(path_ + ".part", errno);
    offset += static_cast<uint64_t>(written);
    bytes = bytes.subspan(static_cast<size_t>(written));
  }
  return absl::OkStatus();
}

absl::Status PartFile::mark_done(size_t chunk) {
  done_[chunk] = true;
  return save(false);
}

absl::Status PartFile::mark_all_done() {
  done_.assign(done_.size(), true);
  return save(false);
}

absl::Status PartFile::reset() {
  done_.assign(done_.size(), false);
  etag_.clear();
  return save(false);
}

absl::Status PartFile::finish(const std::atomic<bool>* stop) {
  absl::Status status = check_content(path_ + ".part", file_, stop);
  if (absl::IsDataLoss(status)) {
    fd_.reset();
    std::remove((path_ + ".part").c_str());
    std::remove((path_ + ".state").c_str());
  }
  if (!status.ok()) return status;
  if (fdatasync(fd_.get()) != 0) return disk_error(path_ + ".part", errno);
  fd_.reset();
  if (std::rename((path_ + ".part").c_str(), path_.c_str()) != 0) return disk_error(path_, errno);
  return save(true);
}

absl::Status PartFile::save(bool complete) const {
  std::string done;
  done.reserve(done_.size());
  for (const bool chunk : done_) done += chunk ? '1' : '0';
  const json::object state = {{"contents", content_identity(file_)},
                              {"chunk_bytes", static_cast<int64_t>(chunk_bytes_)},
                              {"etag", etag_},
                              {"complete", complete},
                              {"done", done}};
  return write_file(path_ + ".state", json::serialize(state));
}

uint64_t PartFile::bytes_on_disk(const std::string& staging, const HubFile& file) {
  const std::string path = staging + "/" + file.path;
  if (finished(staging, file)) return file.size;
  struct stat info {};
  if (lstat((path + ".part").c_str(), &info) != 0 || !S_ISREG(info.st_mode)) return 0;
  return std::min(file.size, static_cast<uint64_t>(info.st_blocks) * 512);
}

bool PartFile::finished(const std::string& staging, const HubFile& file) {
  const std::string path = staging + "/" + file.path;
  const State state = load_state(path + ".state");
  return state.complete && state.identity == content_identity(file) && has_size(path, file.size);
}

}  // namespace tensorfold
