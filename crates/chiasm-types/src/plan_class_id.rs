use std::fmt;

/// The number of a plan class in a fleet, written `class_0`.
///
/// Workers of one class can share a plan of a request. A number keeps its class for the lifetime of
/// the fleet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PlanClassId(pub u32);

impl fmt::Display for PlanClassId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "class_{}", self.0)
    }
}
