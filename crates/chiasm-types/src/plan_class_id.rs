use std::fmt;

/// The number of a plan class in a fleet: workers that can be given one plan of a request are of
/// the same class. Written `class_0`.
///
/// A number means one class for as long as the fleet lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PlanClassId(pub u32);

impl fmt::Display for PlanClassId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "class_{}", self.0)
    }
}
