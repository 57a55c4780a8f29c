#include "coordinator/draft/drafter.h"

#include "absl/status/status.h"
#include "coordinator/draft/copy_drafter.h"
#include "fmt/format.h"

namespace tensorfold {
namespace {

class NoDrafter final : public Drafter {
 public:
  explicit NoDrafter(DraftKind kind) : kind_(kind) {}
  DraftKind kind() const override { return kind_; }
  void observe(std::span<const uint32_t>) override {}
  Draft propose(std::span<const uint32_t>, size_t) override { return {}; }

 private:
  DraftKind kind_;
};

}  // namespace

absl::StatusOr<DraftKind> parse_draft_kind(std::string_view name) {
  if (name == "none" || name == "off") return DraftKind::kNone;
  if (name == "mtp") return DraftKind::kMtp;
  if (name == "copy") return DraftKind::kCopy;
  if (name == "dflash" || name == "dspark") return DraftKind::kBlock;
  if (name == "auto") return DraftKind::kAuto;
  return absl::InvalidArgumentError(
      fmt::format("unknown drafter '{}'; there are none, mtp, copy, dflash, dspark and auto", name));
}

std::string_view draft_kind_name(DraftKind kind) {
  switch (kind) {
    case DraftKind::kNone:
      return "none";
    case DraftKind::kMtp:
      return "mtp";
    case DraftKind::kCopy:
      return "copy";
    case DraftKind::kBlock:
      return "block";
    case DraftKind::kAuto:
      return "auto";
  }
  return "unknown";
}

DraftKindInfo info_of(DraftKind kind) {
  switch (kind) {
    case DraftKind::kMtp:
      return {kind, true, true, false};
    case DraftKind::kBlock:
      return {kind, true, false, true};
    case DraftKind::kNone:
    case DraftKind::kCopy:
    case DraftKind::kAuto:  // uses an MTP layer and a block drafter where there are
      return {kind, false, false, false};
  }
  return {};
}

std::unique_ptr<Drafter> make_drafter(DraftKind kind, CopyOptions options) {
  if (kind == DraftKind::kCopy || kind == DraftKind::kAuto) return std::make_unique<CopyDrafter>(options);
  return std::make_unique<NoDrafter>(kind);
}

}  // namespace tensorfold
