//! One line of the answer.

use serde_json::{Value, json};

/// How much a finding matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Severity {
    /// Nothing is to be done.
    Ok,
    /// Serving works, with less than there could be.
    Warning,
    /// Serving fails.
    Problem,
}

impl Severity {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Problem => "problem",
        }
    }
}

/// What a check has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Finding {
    /// The check's name, one word.
    pub(super) check: &'static str,
    pub(super) severity: Severity,
    /// What is so.
    pub(super) found: String,
    /// What to do about it; empty where nothing is to be done.
    pub(super) advice: String,
}

impl Finding {
    pub(super) fn ok(check: &'static str, found: impl Into<String>) -> Self {
        Self { check, severity: Severity::Ok, found: found.into(), advice: String::new() }
    }

    pub(super) fn warning(
        check: &'static str,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self { check, severity: Severity::Warning, found: found.into(), advice: advice.into() }
    }

    pub(super) fn problem(
        check: &'static str,
        found: impl Into<String>,
        advice: impl Into<String>,
    ) -> Self {
        Self { check, severity: Severity::Problem, found: found.into(), advice: advice.into() }
    }

    /// One line for people; line breaks that a fact has are none here.
    pub(super) fn as_text(&self) -> String {
        let Self { check, severity, found, advice } = self;
        let advice = if advice.is_empty() { String::new() } else { format!(": {advice}") };
        format!("{:8} {check:14} {found}{advice}", severity.name()).replace(['\n', '\r'], " ")
    }

    pub(super) fn as_json(&self) -> Value {
        let Self { check, severity, found, advice } = self;
        json!({"check": check, "severity": severity.name(), "found": found, "advice": advice})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_finding_is_one_line() {
        let finding = Finding::warning("gpus", "none\nat all", "get one");
        assert_eq!(finding.as_text(), "warning  gpus           none at all: get one");
        assert_eq!(finding.as_json()["severity"], "warning");
        assert_eq!(Finding::ok("port", "free").as_text(), "ok       port           free");
    }
}
