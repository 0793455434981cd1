// What the processes of a group tell each other in turn, over the connections of a
// handshake, before Peers watches these.
#pragma once

#include <string>
#include <vector>

#include "platform/deadline.h"
#include "platform/file_descriptor.h"
#include "transport/process/group.h"
#include "transport/process/handshake.h"

namespace jax_ub {

struct Note {
  std::string text;  // up to 8 KiB
  std::vector<FileDescriptor> passed;
};

class Notes {
 public:
  // `partners` [place]; those without a connection are left out. Both outlive it.
  Notes(const Group& group, std::vector<Partner>& partners);

  // Returns everybody's [place], the own one among them, empty for those left out. All
  // processes exchange equally often. Throws CommunicatorError, what a partner said if it
  // failed, and DeadlineError.
  std::vector<Note> Exchange(Note own, const Deadline& deadline);

  // To all partners, so that none waits for this process.
  void TellFailure(const std::exception_ptr& reason) const;

 private:
  // In place of the number of descriptors that a note lacks: the note itself has not come.
  static constexpr int kMissing = -1;

  void Send(int place, const Note& note) const;
  bool IsReached(int place) const;
  // Takes what has come.
  void Hear(int place, Note& note, int& num_missing);
  void Take(int place, Message message, Note& note, int& num_missing) const;
  [[noreturn]] void Fail(const std::string& text) const;

  const Group& group_;
  std::vector<Partner>& partners_;
};

}  // namespace jax_ub
