#include "tests/coordinator/load/scripted_server.h"

#include <arpa/inet.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include "coordinator/api/chat_reply.h"
#include "coordinator/sampling/identity.h"

namespace tensorfold {

ScriptedServer::ScriptedServer(Chat chat) : chat_(std::move(chat)) {
  listener_ = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  if (bind(listener_, reinterpret_cast<sockaddr*>(&address), size) != 0 || listen(listener_, 128) != 0) {
    throw std::runtime_error("no port to listen on");
  }
  getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
  port_ = ntohs(address.sin_port);
  acceptor_ = std::thread([this] { accept(); });
}

ScriptedServer::~ScriptedServer() {
  go_away();
  acceptor_.join();
  for (std::thread& thread : threads_) thread.join();
  close(listener_);
}

void ScriptedServer::go_away() {
  over_ = true;
  shutdown(listener_, SHUT_RDWR);
  const std::lock_guard lock(mutex_);
  for (const int socket : sockets_) shutdown(socket, SHUT_RDWR);
}

void ScriptedServer::accept() {
  while (!over_) {
    const int socket = ::accept(listener_, nullptr, nullptr);
    if (socket < 0) continue;
    const std::lock_guard lock(mutex_);
    if (over_) shutdown(socket, SHUT_RDWR);
    sockets_.push_back(socket);
    threads_.emplace_back([this, socket] {
      serve(socket);
      const std::lock_guard lock(mutex_);
      sockets_.remove(socket);
      close(socket);
    });
  }
}

void ScriptedServer::serve(int socket) {
  std::string buffer;
  char piece[65536];
  const auto fill = [&] {
    const ssize_t got = recv(socket, piece, sizeof piece, 0);
    if (got > 0) buffer.append(piece, static_cast<size_t>(got));
    return got > 0;
  };
  while (true) {
    size_t end = 0;
    while ((end = buffer.find("\r\n\r\n")) == std::string::npos) {
      if (!fill()) return;
    }
    const std::string head = buffer.substr(0, end);
    buffer.erase(0, end + 4);
    const size_t length = head.find("Content-Length: ");
    const size_t size = length == std::string::npos ? 0 : std::strtoul(head.c_str() + length + 16, nullptr, 10);
    while (buffer.size() < size) {
      if (!fill()) return;
    }
    const std::string body = buffer.substr(0, size);
    buffer.erase(0, size);
    const Answer made = answer(head, body);
    for (std::string_view left = made.bytes; !left.empty();) {
      const ssize_t sent = send(socket, left.data(), left.size(), MSG_NOSIGNAL);
      if (sent <= 0) return;
      left.remove_prefix(static_cast<size_t>(sent));
    }
    while (made.silent && fill()) {
    }
    if (made.closes || made.silent) return;
  }
}

ScriptedServer::Answer ScriptedServer::answer(const std::string& head, const std::string& body) {
  if (head.starts_with("GET /ready")) return {plain_response(200, R"({"ready":true,"reason":null})")};
  if (head.starts_with("GET /v1/models")) {
    return {plain_response(200, R"({"object":"list","data":[{"id":"scripted","max_model_len":8192}]})")};
  }
  if (head.starts_with("POST /tokenize")) return {plain_response(200, R"({"tokens":[],"count":600})")};
  return chat_(body, chats_++);
}

std::string plain_response(int status, std::string_view body, std::string_view headers) {
  return fmt::format("HTTP/1.1 {} Said\r\nContent-Type: application/json\r\n{}Content-Length: {}\r\n\r\n{}", status,
                     headers, body.size(), body);
}

std::string stream_head_text() { return "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"; }

std::string streamed_response(const std::vector<uint32_t>& ids) {
  ReplyHead head;
  head.id = "chatcmpl-1";
  head.include_usage = true;
  GenerationStats stats;
  stats.prompt_tokens = 10;
  stats.completion_tokens = static_cast<uint32_t>(ids.size());
  stats.token_sha = token_sha(ids);
  std::string body = chat_role_event(head, 0);
  for (const uint32_t id : ids) {
    ChatDelta delta;
    delta.content = fmt::format(" w{}", id);
    body += chat_delta_event(head, 0, delta);
  }
  body += chat_finish_event(head, 0, FinishReason::kStop, stats);
  body += chat_usage_event(head, std::span(&stats, 1)) + sse_done();
  return fmt::format("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: {}\r\n\r\n{}", body.size(),
                     body);
}

}  // namespace tensorfold
