#include "tests/coordinator/http/raw_client.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>

namespace tensorfold {

RawClient::RawClient(uint16_t port, int receive_buffer) {
  fd_ = socket(AF_INET, SOCK_STREAM, 0);
  if (fd_ < 0) return;
  if (receive_buffer > 0) setsockopt(fd_, SOL_SOCKET, SO_RCVBUF, &receive_buffer, sizeof receive_buffer);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) close();
}

RawClient::~RawClient() { close(); }

void RawClient::close() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

void RawClient::reset() {
  const linger hard{.l_onoff = 1, .l_linger = 0};
  setsockopt(fd_, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
  close();
}

bool RawClient::send(std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
  return true;
}

bool RawClient::fill() {
  pollfd poller{.fd = fd_, .events = POLLIN, .revents = 0};
  if (poll(&poller, 1, 10000) <= 0) return false;
  char bytes[65536];
  const ssize_t got = recv(fd_, bytes, sizeof bytes, 0);
  if (got <= 0) return false;
  buffer_.append(bytes, static_cast<size_t>(got));
  return true;
}

bool RawClient::read_until(std::string_view text) {
  while (buffer_.find(text) == std::string::npos) {
    if (!fill()) return false;
  }
  return true;
}

bool RawClient::ends() {
  for (int i = 0; i < 100; ++i) {
    pollfd poller{.fd = fd_, .events = POLLIN, .revents = 0};
    if (poll(&poller, 1, 100) == 0) continue;
    if (!fill()) return true;
  }
  return false;
}

std::optional<std::string> RawClient::line() {
  if (!read_until("\r\n")) return std::nullopt;
  const size_t end = buffer_.find("\r\n");
  std::string out = buffer_.substr(0, end);
  buffer_.erase(0, end + 2);
  return out;
}

RawReply RawClient::read_reply(bool head_only) {
  RawReply reply;
  std::optional<std::string> first = line();
  if (!first || !first->starts_with("HTTP/1.1 ") || first->size() < 12) return reply;
  reply.status = std::atoi(first->c_str() + 9);
  while (auto header = line()) {
    if (header->empty()) break;
    const size_t colon = header->find(": ");
    if (colon == std::string::npos) {
      reply.well_formed = false;
      return reply;
    }
    std::string name = header->substr(0, colon);
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
    reply.headers[name] = header->substr(colon + 2);
  }
  if (head_only || reply.status == 204 || reply.status == 100) return reply;
  if (reply.headers.count("transfer-encoding") > 0) {
    while (true) {
      const std::optional<std::string> head = line();
      if (!head) break;
      const size_t size = std::strtoul(head->c_str(), nullptr, 16);
      while (buffer_.size() < size + 2) {
        if (!fill()) break;
      }
      if (buffer_.size() < size + 2 || buffer_.compare(size, 2, "\r\n") != 0) break;
      reply.body += buffer_.substr(0, size);
      buffer_.erase(0, size + 2);
      if (size == 0) return reply;
    }
    reply.well_formed = false;
    return reply;
  }
  const auto length = reply.headers.find("content-length");
  if (length == reply.headers.end()) {  // until the connection ends
    while (fill()) {
    }
    reply.body = std::move(buffer_);
    return reply;
  }
  const size_t size = std::strtoul(length->second.c_str(), nullptr, 10);
  while (buffer_.size() < size) {
    if (!fill()) break;
  }
  reply.well_formed = buffer_.size() >= size;
  reply.body = buffer_.substr(0, size);
  buffer_.erase(0, size);
  return reply;
}

std::string post_text(std::string_view path, std::string_view body, std::string_view headers) {
  std::string out = "POST " + std::string(path) + " HTTP/1.1\r\nHost: localhost\r\n";
  if (headers.find("Content-Type") == std::string_view::npos) out += "Content-Type: application/json\r\n";
  out += std::string(headers) + "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n";
  return out + std::string(body);
}

std::string get_text(std::string_view path, std::string_view headers) {
  return "GET " + std::string(path) + " HTTP/1.1\r\nHost: localhost\r\n" + std::string(headers) + "\r\n";
}

RawReply post(uint16_t port, std::string_view path, std::string_view body, std::string_view headers) {
  RawClient client(port);
  client.send(post_text(path, body, headers));
  return client.read_reply();
}

RawReply get(uint16_t port, std::string_view path, std::string_view headers) {
  RawClient client(port);
  client.send(get_text(path, headers));
  return client.read_reply();
}

std::optional<std::vector<std::string>> sse_data(std::string_view body) {
  std::vector<std::string> out;
  while (!body.empty()) {
    const size_t end = body.find("\n\n");
    if (end == std::string_view::npos) return std::nullopt;
    const std::string_view event = body.substr(0, end);
    body.remove_prefix(end + 2);
    if (event.find('\n') != std::string_view::npos) return std::nullopt;
    if (event.starts_with(": ")) continue;
    if (!event.starts_with("data: ")) return std::nullopt;
    out.emplace_back(event.substr(6));
  }
  return out;
}

}  // namespace tensorfold
