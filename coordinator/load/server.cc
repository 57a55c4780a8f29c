#include "coordinator/load/server.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <boost/json.hpp>
#include <thread>

#include "coordinator/hub/resolve.h"
#include "coordinator/load/conversation.h"
#include "coordinator/load/malformed.h"

namespace tensorfold {
namespace {

namespace json = boost::json;

constexpr std::chrono::milliseconds kPoll{200};
constexpr int64_t kSampleWords = 400;
constexpr int64_t kTemplateTokens = 512;  // room for a template, questions and a history beside the long part

std::string get_text(const LoadOptions& options, const char* path) {
  std::string out = fmt::format("GET {} HTTP/1.1\r\nHost: {}\r\n", path, options.url.authority());
  if (!options.api_key.empty()) out += fmt::format("Authorization: Bearer {}\r\n", options.api_key);
  return out + "\r\n";
}

absl::StatusOr<Exchange> ask(LoadClient& client, std::string bytes) {
  Exchange answer = client.ask({.bytes = std::move(bytes), .ends_after = false, .keeps = true, .leave = {}});
  if (answer.end == ExchangeEnd::kNotConnected) {
    return absl::UnavailableError(answer.message + "; is the server running, and is --url right?");
  }
  if (answer.end == ExchangeEnd::kBroken) return absl::InvalidArgumentError(answer.message);
  if (answer.end != ExchangeEnd::kReply) return absl::UnavailableError(answer.message);
  if (answer.status == 401) {
    return absl::PermissionDeniedError(
        fmt::format("{} wants an API key, or another one: --api-key-file", client.settings().authority));
  }
  return answer;
}

// Why the server is not ready; empty when it is.
absl::StatusOr<std::string> not_ready(LoadClient& client, const LoadOptions& options) {
  const absl::StatusOr<Exchange> answer = ask(client, get_text(options, "/ready"));
  if (!answer.ok()) return answer.status();
  if (answer->status == 200 || answer->status == 404) return "";  // others than ours may have no such path
  json::error_code error;
  const json::value root = json::parse(answer->body, error);
  if (!error && root.is_object()) {
    const json::value* reason = root.get_object().if_contains("reason");
    if (reason != nullptr && reason->is_string()) return std::string(reason->get_string().c_str());
  }
  return fmt::format("/ready answers with {}", answer->status);
}

absl::Status wait_until_ready(LoadClient& client, const LoadOptions& options) {
  const LoadClock::time_point until = LoadClock::now() + options.wait_ready;
  while (true) {
    const absl::StatusOr<std::string> reason = not_ready(client, options);
    if (reason.ok() && reason->empty()) return absl::OkStatus();
    const bool may_come = reason.ok() || absl::IsUnavailable(reason.status());
    if (!may_come || LoadClock::now() >= until) {
      if (!reason.ok()) return reason.status();
      return absl::UnavailableError(fmt::format("{} is not ready: {}{}", client.settings().authority, *reason,
                                                options.wait_ready.count() > 0 ? "" : " (--wait-ready waits)"));
    }
    std::this_thread::sleep_for(kPoll);
  }
}

absl::Status read_models(LoadClient& client, const LoadOptions& options, LoadServer* server) {
  const absl::StatusOr<Exchange> answer = ask(client, get_text(options, "/v1/models"));
  if (!answer.ok()) return answer.status();
  const auto foreign = [&] {
    return absl::InvalidArgumentError(
        fmt::format("{} does not list its models at /v1/models (status {}): no server of "
                    "this API, or a path too many in --url",
                    client.settings().authority, answer->status));
  };
  json::error_code error;
  const json::value root = json::parse(answer->body, error);
  const json::value* data = !error && root.is_object() ? root.get_object().if_contains("data") : nullptr;
  if (answer->status != 200 || data == nullptr || !data->is_array()) return foreign();
  std::vector<std::string> names;
  for (const json::value& item : data->get_array()) {
    const json::value* id = item.is_object() ? item.get_object().if_contains("id") : nullptr;
    if (id == nullptr || !id->is_string()) return foreign();
    names.emplace_back(id->get_string().c_str());
    const std::string& wanted = options.conversation.model;
    if (!server->model.empty() || (!wanted.empty() && wanted != names.back())) continue;
    server->model = names.back();
    const json::object& model = item.get_object();
    if (const json::value* context = model.if_contains("max_model_len"); context != nullptr && context->is_int64()) {
      server->context = std::max<int64_t>(0, context->get_int64());
    }
    if (const json::value* print = model.if_contains("fingerprint"); print != nullptr && print->is_string()) {
      server->fingerprint = print->get_string().c_str();
    }
  }
  if (!server->model.empty()) return absl::OkStatus();
  if (names.empty()) return foreign();
  return absl::NotFoundError(fmt::format("{} serves no model {}; it serves {}", client.settings().authority,
                                         options.conversation.model, fmt::join(names, ", ")));
}

// Servers without /tokenize leave the guess as it is.
absl::Status measure_words(LoadClient& client, const LoadOptions& options, LoadServer* server) {
  LoadRandom random(options.conversation.seed);
  const std::string body = json::serialize(json::object{{"prompt", load_text(random, kSampleWords)}});
  const absl::StatusOr<Exchange> answer = ask(client, post_head(options, "/tokenize", body.size()) + body);
  if (!answer.ok()) return answer.status();
  json::error_code error;
  const json::value root = json::parse(answer->body, error);
  const json::value* count = !error && root.is_object() ? root.get_object().if_contains("count") : nullptr;
  if (answer->status == 200 && count != nullptr && count->is_int64() && count->get_int64() > 0) {
    server->tokens_per_word = static_cast<double>(count->get_int64()) / kSampleWords;
  }
  return absl::OkStatus();
}

absl::Status check_sizes(const ConversationOptions& sizes, const LoadServer& server) {
  if (server.context == 0) return absl::OkStatus();
  const bool prefix = sizes.mix == LoadMix::kSharedPrefix || sizes.mix == LoadMix::kMixed;
  const bool prompt = sizes.mix == LoadMix::kLongPrompt || sizes.mix == LoadMix::kMixed;
  const auto check = [&](const char* option, int tokens) {
    const int64_t needed = tokens + sizes.reply_tokens + std::min<int64_t>(kTemplateTokens, server.context / 4);
    if (needed <= server.context) return absl::OkStatus();
    return absl::InvalidArgumentError(
        fmt::format("{} {} does not fit the context of {} tokens beside {} reply tokens and a template", option, tokens,
                    server.context, sizes.reply_tokens));
  };
  absl::Status status = prompt ? check("--prompt-tokens", sizes.prompt_tokens) : absl::OkStatus();
  if (prefix) status.Update(check("--prefix-tokens", sizes.prefix_tokens));
  return status;
}

}  // namespace

absl::StatusOr<LoadServer> find_server(const LoadOptions& options) {
  LoadServer server;
  server.client.authority = options.url.authority();
  server.client.connect_timeout = options.connect_timeout;
  server.client.idle_timeout = options.idle_timeout;
  server.client.timeout = options.timeout;
  absl::StatusOr<std::vector<ResolvedAddress>> addresses =
      resolve_host(options.url.host, LoadClock::now() + options.connect_timeout, nullptr);
  if (!addresses.ok()) return addresses.status();
  for (const ResolvedAddress& address : *addresses) {
    boost::system::error_code error;
    const auto parsed = boost::asio::ip::make_address(address, error);
    if (!error) server.client.endpoints.emplace_back(parsed, options.url.port);
  }
  boost::asio::io_context io;
  LoadClient client(io, server.client);
  if (absl::Status status = wait_until_ready(client, options); !status.ok()) return status;
  if (absl::Status status = read_models(client, options, &server); !status.ok()) return status;
  if (absl::Status status = measure_words(client, options, &server); !status.ok()) return status;
  if (absl::Status status = check_sizes(options.conversation, server); !status.ok()) return status;
  return server;
}

}  // namespace tensorfold
