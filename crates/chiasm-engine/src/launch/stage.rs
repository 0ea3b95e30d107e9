//! The progress of an engine's start, read from its log: loading tens of gigabytes takes minutes.

use std::time::{Duration, Instant};

/// The stages of a start in order: the log message of vLLM 0.31 to 0.33, and a description.
const STAGES: [(&str, &str); 7] = [
    ("Initializing a V1 LLM engine", "setting up its processes"),
    ("Starting to load model", "loading the model"),
    ("checkpoint shards: ", "loading the model"),
    ("Dynamo bytecode transform time", "compiling the model"),
    ("Compiling a graph for", "compiling the model"),
    ("Available KV cache memory", "making its KV cache"),
    ("KV cache size: ", "warming up"),
];
/// The minimum interval between two reports of one stage.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);

/// The progress of an engine's start, over all of its processes.
#[derive(Debug, Default)]
pub(super) struct StartupProgress {
    /// The index of the last stage reached in [`STAGES`].
    reached: Option<usize>,
    reported_at: Option<Instant>,
}

impl StartupProgress {
    /// Reads a line of the log. Returns the text to report: a stage that no process has reached
    /// before, or the percentage of the current stage, at most once per [`REPORT_INTERVAL`].
    pub(super) fn read_line(&mut self, line: &str, now: Instant) -> Option<String> {
        let at = STAGES.iter().position(|(message, _)| line.contains(message))?;
        let description = STAGES[at].1;
        let is_new =
            self.reached.is_none_or(|reached| at > reached && STAGES[reached].1 != description);
        let is_due = self
            .reported_at
            .is_none_or(|reported_at| now.duration_since(reported_at) >= REPORT_INTERVAL);
        let percent =
            percent(line).filter(|_| is_due && self.reached.is_none_or(|reached| at >= reached));
        self.reached = self.reached.max(Some(at));
        if !is_new && percent.is_none() {
            return None;
        }
        self.reported_at = Some(now);
        Some(match percent {
            Some(percent) => format!("{description}, {percent} %"),
            None => description.to_owned(),
        })
    }
}

/// Parses the number in `…:  25% Completed | 1/4 …`.
fn percent(line: &str) -> Option<u32> {
    let (before, _) = line.split_once("% Completed")?;
    before.rsplit([' ', ':']).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stage_is_reported_once_for_all_processes() {
        let mut progress = StartupProgress::default();
        let now = Instant::now();
        let mut report = |line: &str| progress.read_line(line, now);
        assert_eq!(
            report("INFO [core.py:139] Initializing a V1 LLM engine (v0.33.0)").as_deref(),
            Some("setting up its processes")
        );
        let loading =
            "(Worker_TP0 pid=1) INFO 11-25 [gpu_model_runner.py:4979] Starting to load model /m...";
        assert_eq!(report(loading).as_deref(), Some("loading the model"));
        assert_eq!(report(loading), None, "another rank");
        assert_eq!(report("INFO Loading weights took 3.40 seconds"), None);
        assert_eq!(
            report("INFO [backends.py] Dynamo bytecode transform time: 4.2 s").as_deref(),
            Some("compiling the model")
        );
        assert_eq!(report("INFO Compiling a graph for compile range (1, 8192) takes 9.1 s"), None);
        assert_eq!(report(loading), None, "a rank that is late");
        assert_eq!(
            report("INFO Available KV cache memory: 60.1 GiB").as_deref(),
            Some("making its KV cache")
        );
        assert_eq!(report("INFO GPU KV cache size: 1,000 tokens, ").as_deref(), Some("warming up"));
    }

    #[test]
    fn percentage_is_reported_at_intervals() {
        let mut progress = StartupProgress::default();
        let start = Instant::now();
        let mut report = |seconds: u64, percent: u32| {
            let line = format!(
                "Loading safetensors checkpoint shards: {percent:3}% Completed \
                 | 1/8 [00:07<00:49,  7.1s/it]"
            );
            progress.read_line(&line, start + Duration::from_secs(seconds))
        };
        assert_eq!(report(0, 0).as_deref(), Some("loading the model, 0 %"));
        assert_eq!(report(4, 12), None);
        assert_eq!(report(7, 25).as_deref(), Some("loading the model, 25 %"));
        assert_eq!(report(60, 100).as_deref(), Some("loading the model, 100 %"));
    }
}
