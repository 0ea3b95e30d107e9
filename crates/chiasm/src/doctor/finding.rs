//! One line of the output.

use serde_json::{Value, json};

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Severity {
    /// There is nothing to do.
    Ok,
    /// Serving works, with restrictions.
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

/// The result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Finding {
    /// The check's name, one word.
    pub(super) check: &'static str,
    pub(super) severity: Severity,
    /// The observed state.
    pub(super) found: String,
    /// The advice; empty if there is nothing to do.
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

    /// Formats the finding as one line for people. Line breaks are replaced with spaces.
    pub(super) fn to_text(&self) -> String {
        let Self { check, severity, found, advice } = self;
        let advice = if advice.is_empty() { String::new() } else { format!(": {advice}") };
        format!("{:8} {check:14} {found}{advice}", severity.name()).replace(['\n', '\r'], " ")
    }

    pub(super) fn to_json(&self) -> Value {
        let Self { check, severity, found, advice } = self;
        json!({"check": check, "severity": severity.name(), "found": found, "advice": advice})
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finding_is_one_line() {
        let finding = Finding::warning("gpus", "none\nat all", "get one");
        assert_eq!(finding.to_text(), "warning  gpus           none at all: get one");
        assert_eq!(finding.to_json()["severity"], "warning");
        assert_eq!(Finding::ok("port", "free").to_text(), "ok       port           free");
    }
}
