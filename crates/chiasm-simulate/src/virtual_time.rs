//! The unit of time in a simulation.

/// A time in nanoseconds: since the start of the simulation, or a duration.
pub(crate) type Nanos = u64;

const NANOS_PER_SECOND: f64 = 1e9;

/// Converts seconds to the nearest whole number of nanoseconds. Numbers out of range are clipped.
pub(crate) fn nanos(seconds: f64) -> Nanos {
    (seconds * NANOS_PER_SECOND).round() as Nanos
}

/// Converts nanoseconds to seconds.
pub(crate) fn seconds(nanos: Nanos) -> f64 {
    nanos as f64 / NANOS_PER_SECOND
}
