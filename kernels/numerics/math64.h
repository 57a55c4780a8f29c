// Own float64 exp, log, sine and cosine: the same bits on every machine, whatever its libm.
//
// Written with explicit fma, + - * / and integer operations only, all of which IEEE 754 rounds correctly, so the result
// is a function of the argument alone. Within 2 ulp of the true value. Thread-safe, no errno.
#pragma once

namespace tensorfold {

/// e^x. Over 709.79 gives +inf, under -745.2 gives 0, NaN gives NaN.
double exp64(double x);

/// Natural logarithm. 0 gives -inf, negative and NaN give NaN, +inf gives +inf.
double log64(double x);

/// Sine and cosine of x (radians), |x| <= 2^31; outside that, and for NaN, both are NaN.
void sincos64(double x, double* sine, double* cosine);

/// base^exponent for base > 0, as exp64(exponent * log64(base)): relative error up to (|exponent * ln base| + 2) *
/// 2^-52.
double pow64(double base, double exponent);

}  // namespace tensorfold
