use std::fmt;

/// Which stages of a request a worker computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// Prompts and answers: requests that are its own from the first token to the last.
    #[default]
    Aggregated,
    /// Prompts, whose keys and values other workers read.
    Prefill,
    /// Answers behind prompts that others have computed; also what an aggregated worker computes.
    Decode,
}

impl Role {
    /// Every role, in the order of the stages.
    pub const ALL: [Self; 3] = [Self::Aggregated, Self::Prefill, Self::Decode];

    /// The name on command lines and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Aggregated => "aggregated",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }

    /// The role of this name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.name() == name)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_roles_belong_together() {
        for role in Role::ALL {
            assert_eq!(Role::parse(role.name()), Some(role));
        }
        assert_eq!(Role::parse("Prefill"), None);
    }
}
