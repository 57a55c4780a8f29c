// Under ThreadSanitizer only: gRPC and Abseil come from the distribution without instrumentation, so their own locks
// are not seen and everything they do looks like a race. Calls made from such libraries are left out; our code is not.
extern "C" const char* __tsan_default_options();   // NOLINT(bugprone-reserved-identifier): the sanitizer's name for it
extern "C" const char* __tsan_default_options() {  // NOLINT(bugprone-reserved-identifier)
  return "ignore_noninstrumented_modules=1";
}
