// Any bytes as a reply: the events do not depend on how it is cut. The first byte chooses the options and the cuts.

#include <cstdint>
#include <cstdlib>
#include <string_view>
#include <vector>

#include "coordinator/chat/reply_parser.h"

using namespace tensorfold;

namespace {

std::vector<ReplyEvent> parse(const ReplyParser::Options& options, std::string_view reply, size_t piece) {
  ReplyParser parser(options);
  std::vector<ReplyEvent> all;
  const auto add = [&](std::vector<ReplyEvent> events) {
    for (ReplyEvent& e : events) {
      if (e.kind != ReplyEvent::Kind::kToolCall && !all.empty() && all.back().kind == e.kind) {
        all.back().text += e.text;
      } else {
        all.push_back(std::move(e));
      }
    }
  };
  for (size_t at = 0; at < reply.size(); at += piece) add(parser.feed(reply.substr(at, piece)));
  add(parser.finish());
  return all;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  static const boost::json::value tools = boost::json::parse(
      R"([{"function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}}}])");
  ReplyParser::Options options;
  options.format = {(data[0] & 1) != 0, static_cast<ToolSyntax>((data[0] >> 1) & 3)};
  options.starts_in_reasoning = (data[0] & 8) != 0;
  options.tools = tools;
  const std::string_view reply(reinterpret_cast<const char*>(data) + 1, size - 1);
  if (parse(options, reply, reply.size() + 1) != parse(options, reply, 1 + (data[0] >> 4))) std::abort();
  return 0;
}
