#include "coordinator/load/sse_reader.h"

#include <fmt/format.h>

#include <utility>

namespace tensorfold {

absl::Status SseReader::feed(std::string_view bytes, std::vector<std::string>* data) {
  const auto refuse = [this] {
    broken_ = true;
    return absl::InvalidArgumentError(fmt::format("an event of the stream is longer than {} bytes", most_));
  };
  if (broken_) return refuse();
  while (!bytes.empty()) {
    if (std::exchange(after_cr_, false) && bytes.front() == '\n') {
      bytes.remove_prefix(1);
      continue;
    }
    const size_t end = bytes.find_first_of("\r\n");
    const std::string_view part = bytes.substr(0, end);
    if (line_.size() + event_.size() + part.size() > most_) return refuse();
    line_ += part;
    if (end == std::string_view::npos) break;
    after_cr_ = bytes[end] == '\r';
    bytes.remove_prefix(end + 1);
    end_line(data);
  }
  return absl::OkStatus();
}

void SseReader::end_line(std::vector<std::string>* data) {
  std::string whole = std::exchange(line_, {});
  std::string_view line = whole;
  if (std::exchange(first_line_, false) && line.starts_with("\xEF\xBB\xBF")) line.remove_prefix(3);
  if (line.empty()) {
    if (std::exchange(has_data_, false)) data->push_back(std::exchange(event_, {}));
    return;
  }
  const size_t colon = line.find(':');
  if (line.substr(0, colon) != "data") return;
  std::string_view value = colon == std::string_view::npos ? std::string_view() : line.substr(colon + 1);
  if (value.starts_with(' ')) value.remove_prefix(1);
  if (has_data_) event_ += '\n';
  event_ += value;
  has_data_ = true;
}

}  // namespace tensorfold
