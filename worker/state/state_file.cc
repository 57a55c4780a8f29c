#include "worker/state/state_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "transport/pass/codec.h"

namespace tensorfold {
namespace {

constexpr uint32_t kMagic = 0x54534654;  // "TFST"
constexpr size_t kPrefix = 3 * sizeof(uint32_t);
constexpr size_t kMaxName = 256;

class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int get() const { return fd_; }
  bool open() const { return fd_ >= 0; }

 private:
  int fd_;
};

absl::Status failed(const std::string& what, const std::string& path) {
  const int error = errno;
  const std::string text = fmt::format("{} {}: {}", what, path, std::strerror(error));
  if (error == ENOENT) return absl::NotFoundError(text);
  if (error == ENOSPC || error == EDQUOT) return absl::ResourceExhaustedError(text);
  return absl::InternalError(text);
}

bool read_all(int fd, std::byte* to, size_t size) {
  while (size > 0) {
    const ssize_t got = ::read(fd, to, size);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    to += got;
    size -= static_cast<size_t>(got);
  }
  return true;
}

bool write_all(int fd, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t put = ::write(fd, bytes.data(), bytes.size());
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) return false;
    bytes = bytes.subspan(static_cast<size_t>(put));
  }
  return true;
}

absl::Status sync_folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash);
  const File file(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!file.open() || ::fsync(file.get()) != 0) return failed("cannot make durable", folder);
  return absl::OkStatus();
}

absl::Status check_header(const StateHeader& header) {
  const uint64_t end = header.first_position + header.tokens.size();
  const bool has_snapshot = header.committed != 0;
  if (header.tokens.empty() || header.first_position % kMaxSegmentTokens != 0 ||
      header.first_position > (uint64_t{1} << 40) || header.owner.world == 0 || header.owner.world > 64 ||
      header.owner.rank >= header.owner.world || header.page_bytes == 0 || header.page_bytes > kMaxStatePayload / 32 ||
      header.snapshot_bytes > kMaxStatePayload / 2 || has_snapshot != (header.snapshot_bytes != 0) ||
      (has_snapshot && (header.committed <= header.first_position || header.committed > end)) ||
      (!has_snapshot && !header.kept.empty())) {
    return absl::InvalidArgumentError("its header contradicts itself");
  }
  for (const auto* tokens : {&header.tokens, &header.kept}) {
    if (std::any_of(tokens->begin(), tokens->end(), [](int32_t token) { return token < 0; })) {
      return absl::InvalidArgumentError("its header has a negative token");
    }
  }
  return absl::OkStatus();
}

absl::Status named(const absl::Status& status, const std::string& path) {
  return absl::Status(status.code(), fmt::format("{}: {}", path, std::string(status.message())));
}

// The header of an open file, and the file's size.
absl::StatusOr<StateHeader> header_of(const File& file, size_t* header_size, uint64_t* file_size) {
  struct stat facts {};
  if (::fstat(file.get(), &facts) != 0 || !S_ISREG(facts.st_mode)) return absl::InvalidArgumentError("not a file");
  *file_size = static_cast<uint64_t>(facts.st_size);
  std::vector<std::byte> bytes(kPrefix);
  if (!read_all(file.get(), bytes.data(), kPrefix)) return absl::DataLossError("too short for a state");
  ByteReader reader(bytes);
  const uint32_t magic = reader.get<uint32_t>(), version = reader.get<uint32_t>(), size = reader.get<uint32_t>();
  if (magic != kMagic) return absl::InvalidArgumentError("not a state");
  if (version != kStateVersion) {
    return absl::InvalidArgumentError(fmt::format("version {}, this build reads {}", version, kStateVersion));
  }
  if (size < kPrefix || size > kMaxStateHeader || size > *file_size) {
    return absl::DataLossError(fmt::format("a header of {} bytes in a file of {}", size, *file_size));
  }
  bytes.resize(size);
  if (!read_all(file.get(), bytes.data() + kPrefix, size - kPrefix)) return absl::DataLossError("cut in its header");
  return decode_state_header(bytes, header_size);
}

}  // namespace

std::vector<std::byte> encode_state_header(const StateHeader& header) {
  ByteWriter writer;
  writer.put(kMagic);
  writer.put(kStateVersion);
  writer.put(uint32_t{0});  // the header's size, once it is known
  writer.put_string(header.owner.build);
  writer.put_string(header.owner.fingerprint);
  writer.put(header.owner.rank);
  writer.put(header.owner.world);
  for (const StateKey& key : {header.key, header.parent}) {
    writer.put(key.high);
    writer.put(key.low);
  }
  writer.put(header.first_position);
  writer.put_array(std::span<const int32_t>(header.tokens));
  writer.put(static_cast<uint8_t>(header.mtp));
  writer.put(header.committed);
  writer.put_array(std::span<const int32_t>(header.kept));
  writer.put(header.page_bytes);
  writer.put(header.snapshot_bytes);
  std::vector<std::byte> bytes = std::move(writer.bytes());
  const uint32_t size = static_cast<uint32_t>(bytes.size() + sizeof(uint64_t));
  std::memcpy(bytes.data() + 2 * sizeof(uint32_t), &size, sizeof size);
  const uint64_t sum = XXH3_64bits(bytes.data(), bytes.size());
  bytes.resize(size);
  std::memcpy(bytes.data() + size - sizeof sum, &sum, sizeof sum);
  return bytes;
}

absl::StatusOr<StateHeader> decode_state_header(std::span<const std::byte> bytes, size_t* size) {
  ByteReader prefix(bytes.first(std::min(bytes.size(), kPrefix)));
  const uint32_t magic = prefix.get<uint32_t>(), version = prefix.get<uint32_t>(), length = prefix.get<uint32_t>();
  if (!prefix.ok() || magic != kMagic) return absl::InvalidArgumentError("not a state");
  if (version != kStateVersion) {
    return absl::InvalidArgumentError(fmt::format("version {}, this build reads {}", version, kStateVersion));
  }
  if (length < kPrefix + sizeof(uint64_t) || length > kMaxStateHeader || length > bytes.size()) {
    return absl::DataLossError(fmt::format("a header of {} bytes in {}", length, bytes.size()));
  }
  const auto body = bytes.first(length - sizeof(uint64_t));
  const uint64_t found = ByteReader(bytes.subspan(body.size(), sizeof(uint64_t))).get<uint64_t>();
  if (found != XXH3_64bits(body.data(), body.size())) return absl::DataLossError("its header is damaged");
  ByteReader reader(body.subspan(kPrefix));
  StateHeader header;
  header.owner.build = reader.get_string(kMaxName);
  header.owner.fingerprint = reader.get_string(kMaxName);
  header.owner.rank = reader.get<uint32_t>();
  header.owner.world = reader.get<uint32_t>();
  for (StateKey* key : {&header.key, &header.parent}) {
    key->high = reader.get<uint64_t>();
    key->low = reader.get<uint64_t>();
  }
  header.first_position = reader.get<uint64_t>();
  header.tokens = reader.get_array<int32_t>(kMaxSegmentTokens);
  const uint8_t mtp = reader.get<uint8_t>();
  if (mtp > 1) reader.fail();
  header.mtp = mtp == 1;
  header.committed = reader.get<uint64_t>();
  header.kept = reader.get_array<int32_t>(15);
  header.page_bytes = reader.get<uint64_t>();
  header.snapshot_bytes = reader.get<uint64_t>();
  if (!reader.ok() || reader.left() != 0) return absl::InvalidArgumentError("lengths in its header do not fit");
  if (absl::Status status = check_header(header); !status.ok()) return status;
  *size = length;
  return header;
}

absl::StatusOr<StateHeader> read_state_header(const std::string& path) {
  const File file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!file.open()) return failed("cannot open", path);
  size_t header_size = 0;
  uint64_t file_size = 0;
  absl::StatusOr<StateHeader> header = header_of(file, &header_size, &file_size);
  if (!header.ok()) return named(header.status(), path);
  return header;
}

absl::StatusOr<StateHeader> read_state_file(const std::string& path, std::vector<std::byte>* payload) {
  const File file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!file.open()) return failed("cannot open", path);
  size_t header_size = 0;
  uint64_t file_size = 0;
  absl::StatusOr<StateHeader> header = header_of(file, &header_size, &file_size);
  if (!header.ok()) return named(header.status(), path);
  const uint64_t wanted = header->payload_bytes();
  if (wanted > kMaxStatePayload || file_size != header_size + wanted + sizeof(uint64_t)) {
    return absl::DataLossError(
        fmt::format("{}: {} bytes, its header wants {}", path, file_size, header_size + wanted + sizeof(uint64_t)));
  }
  payload->resize(wanted);
  uint64_t sum = 0;
  if (!read_all(file.get(), payload->data(), payload->size()) ||
      !read_all(file.get(), reinterpret_cast<std::byte*>(&sum), sizeof sum)) {
    return absl::DataLossError(path + ": cut while it was read");
  }
  if (sum != XXH3_64bits(payload->data(), payload->size()))
    return absl::DataLossError(path + ": its pages are damaged");
  return header;
}

absl::Status write_state_file(const std::string& path, const StateHeader& header, std::span<const std::byte> payload) {
  const std::string unfinished = fmt::format("{}.{}.tmp", path, ::getpid());
  {
    const File file(::open(unfinished.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!file.open()) return failed("cannot write", unfinished);
    const uint64_t sum = XXH3_64bits(payload.data(), payload.size());
    const bool written = write_all(file.get(), encode_state_header(header)) && write_all(file.get(), payload) &&
                         write_all(file.get(), std::as_bytes(std::span(&sum, 1)));
    if (!written || ::fsync(file.get()) != 0) {
      const absl::Status status = failed("cannot write", unfinished);
      ::unlink(unfinished.c_str());
      return status;
    }
  }
  if (::rename(unfinished.c_str(), path.c_str()) != 0) {
    const absl::Status status = failed("cannot rename to", path);
    ::unlink(unfinished.c_str());
    return status;
  }
  return sync_folder_of(path);
}

}  // namespace tensorfold
