use std::fmt;

crate::every_variant! {
    /// The stages of a request that a worker computes.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
    pub enum Role {
        /// Prompts and answers: the worker computes whole requests.
        #[default]
        Aggregated,
        /// Media items, whose embeddings other workers of the same machine load.
        Encode,
        /// Prompts, whose keys and values other workers read.
        Prefill,
        /// Answers to prompts that other workers have computed. Such a worker also computes whole
        /// requests, as an aggregated worker does.
        Decode,
    }
}

impl Role {
    /// Returns the name on command lines and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Aggregated => "aggregated",
            Self::Encode => "encode",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }

    /// Parses a name. `encode-prefill` is an alias of prefill: a worker that computes prompts also
    /// encodes the media items that no other worker has encoded.
    pub fn parse(name: &str) -> Option<Self> {
        match name {
            "encode-prefill" => Some(Self::Prefill),
            _ => Self::ALL.into_iter().find(|role| role.name() == name),
        }
    }

    /// Returns `true` if a worker with this role can generate answers, with or without a prompt
    /// that another worker has computed.
    pub fn can_answer(self) -> bool {
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
    fn name_parses_to_its_role() {
        for role in Role::ALL {
            assert_eq!(Role::parse(role.name()), Some(role));
        }
        assert_eq!(
            (Role::parse("encode-prefill"), Role::parse("Prefill")),
            (Some(Role::Prefill), None)
        );
    }
}
