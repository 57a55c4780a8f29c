#include "coordinator/schedule/waiting_line.h"

#include <algorithm>
#include <utility>

namespace tensorfold {

void WaitingLine::push(std::unique_ptr<Sequence> sequence) {
  Line& line = line_of(*sequence);
  line.push_back(std::move(sequence));
}

void WaitingLine::push_back_in(std::unique_ptr<Sequence> sequence) {
  Line& line = line_of(*sequence);
  const auto later = std::find_if(
      line.begin(), line.end(), [&](const std::unique_ptr<Sequence>& other) { return sequence->came_before(*other); });
  line.insert(later, std::move(sequence));
}

Sequence* WaitingLine::next() const {
  if (!foreground_.empty()) return foreground_.front().get();
  return background_.empty() ? nullptr : background_.front().get();
}

std::unique_ptr<Sequence> WaitingLine::pop() {
  Line& line = foreground_.empty() ? background_ : foreground_;
  std::unique_ptr<Sequence> first = std::move(line.front());
  line.pop_front();
  return first;
}

void WaitingLine::erase_if(const std::function<bool(Sequence&)>& ended) {
  for (Line* line : {&foreground_, &background_}) {
    std::erase_if(*line, [&](const std::unique_ptr<Sequence>& sequence) { return ended(*sequence); });
  }
}

void WaitingLine::for_each(const std::function<void(Sequence&)>& visit) const {
  for (const Line* line : {&foreground_, &background_}) {
    for (const std::unique_ptr<Sequence>& sequence : *line) visit(*sequence);
  }
}

void WaitingLine::clear() {
  foreground_.clear();
  background_.clear();
}

}  // namespace tensorfold
