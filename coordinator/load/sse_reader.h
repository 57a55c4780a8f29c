// Server-sent events out of a stream of bytes that may be cut anywhere (WHATWG HTML, "Server-sent events").
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"

namespace tensorfold {

/// Only `data` matters here; comments and other fields are skipped. Never holds more than the limit. One owner.
class SseReader {
 public:
  explicit SseReader(size_t most_bytes = size_t{4} << 20) : most_(most_bytes) {}

  /// Appends the data of each event that `bytes` completes. InvalidArgument when one event or line is longer than the
  /// limit; nothing more is read then.
  absl::Status feed(std::string_view bytes, std::vector<std::string>* data);
  /// Whether the stream stands between two events: it may end here.
  bool between_events() const { return line_.empty() && !has_data_; }

 private:
  void end_line(std::vector<std::string>* data);

  size_t most_;
  std::string line_;   // so far
  std::string event_;  // data of the lines so far
  bool has_data_ = false;
  bool after_cr_ = false;  // a line end of "\r\n" whose second half may come with the next bytes
  bool first_line_ = true;
  bool broken_ = false;
};

}  // namespace tensorfold
