//! Time inside a simulation.

/// Nanoseconds since the start of the simulation.
pub(crate) type Nanos = u64;

const PER_SECOND: f64 = 1e9;

/// The nearest whole number of nanoseconds; negative and absurd numbers are clipped.
pub(crate) fn nanos(seconds: f64) -> Nanos {
    (seconds * PER_SECOND).round() as Nanos
}

pub(crate) fn seconds(nanos: Nanos) -> f64 {
    nanos as f64 / PER_SECOND
}
