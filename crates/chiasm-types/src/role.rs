use std::fmt;

crate::every_variant! {
    /// Which stages of a request a worker computes.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum Role {
        /// Prompts and answers: requests that are its own from the first token to the last.
        #[default]
        Aggregated,
        /// Media items, whose embeddings other workers of its machine find.
        Encode,
        /// Prompts, whose keys and values other workers read.
        Prefill,
        /// Answers behind prompts that others have computed; also what an aggregated worker
        /// computes.
        Decode,
    }
}

impl Role {
    /// The name on command lines and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Aggregated => "aggregated",
            Self::Encode => "encode",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }

    /// The role of this name. `encode-prefill` is another word for prefill: a worker that computes
    /// prompts encodes what of their media items nobody else has encoded.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "encode-prefill" => Some(Self::Prefill),
            _ => Self::ALL.into_iter().find(|role| role.name() == name),
        }
    }

    /// Whether a worker can answer a request, however that was begun.
    pub fn answers(self) -> bool {
        self != Self::Encode
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
        assert_eq!(
            (Role::parse("encode-prefill"), Role::parse("Prefill")),
            (Some(Role::Prefill), None)
        );
    }
}
