//! What an engine that starts is doing, by its own words: loading tens of gigabytes takes minutes,
//! in which its user wants to know.

use std::time::{Duration, Instant};

/// How vLLM 0.31 to 0.33 begin something that takes long, in the order in which they do, and what
/// it is.
const STAGES: [(&str, &str); 7] = [
    ("Initializing a V1 LLM engine", "setting up its processes"),
    ("Starting to load model", "loading the model"),
    ("checkpoint shards: ", "loading the model"),
    ("Dynamo bytecode transform time", "compiling the model"),
    ("Compiling a graph for", "compiling the model"),
    ("Available KV cache memory", "making its KV cache"),
    ("KV cache size: ", "warming up"),
];
/// Between two lines about the same stage, at least.
const PAUSE: Duration = Duration::from_secs(5);

/// How far an engine is, told by all of its processes.
#[derive(Debug, Default)]
pub(super) struct Stage {
    /// Its place among [`STAGES`].
    reached: Option<usize>,
    told: Option<Instant>,
}

impl Stage {
    /// What is to be told of a line that an engine has said now: a stage that none of its processes
    /// has reached before, or how far the present one is, if that was not told lately.
    pub(super) fn told_by(&mut self, line: &str, now: Instant) -> Option<String> {
        let at = STAGES.iter().position(|(words, _)| line.contains(words))?;
        let doing = STAGES[at].1;
        let is_new = self.reached.is_none_or(|reached| at > reached && STAGES[reached].1 != doing);
        let is_due = self.told.is_none_or(|told| now.duration_since(told) >= PAUSE);
        let percent =
            percent(line).filter(|_| is_due && self.reached.is_none_or(|reached| at >= reached));
        self.reached = self.reached.max(Some(at));
        if !is_new && percent.is_none() {
            return None;
        }
        self.told = Some(now);
        Some(percent.map_or_else(|| doing.to_owned(), |percent| format!("{doing}, {percent} %")))
    }
}

/// The number in `…:  25% Completed | 1/4 …`.
fn percent(line: &str) -> Option<u32> {
    let (before, _) = line.split_once("% Completed")?;
    before.rsplit([' ', ':']).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_stage_is_told_once_whichever_process_tells_it_and_none_again() {
        let mut stage = Stage::default();
        let now = Instant::now();
        let mut told = |line: &str| stage.told_by(line, now);
        assert_eq!(
            told("INFO [core.py:139] Initializing a V1 LLM engine (v0.33.0)").as_deref(),
            Some("setting up its processes")
        );
        let loads =
            "(Worker_TP0 pid=1) INFO 11-25 [gpu_model_runner.py:4979] Starting to load model /m...";
        assert_eq!(told(loads).as_deref(), Some("loading the model"));
        assert_eq!(told(loads), None, "another rank");
        assert_eq!(told("INFO Loading weights took 3.40 seconds"), None);
        assert_eq!(
            told("INFO [backends.py] Dynamo bytecode transform time: 4.2 s").as_deref(),
            Some("compiling the model")
        );
        assert_eq!(told("INFO Compiling a graph for compile range (1, 8192) takes 9.1 s"), None);
        assert_eq!(told(loads), None, "a rank that is late");
        assert_eq!(
            told("INFO Available KV cache memory: 60.1 GiB").as_deref(),
            Some("making its KV cache")
        );
        assert_eq!(told("INFO GPU KV cache size: 1,000 tokens, ").as_deref(), Some("warming up"));
    }

    #[test]
    fn how_far_a_long_stage_is_is_told_now_and_then() {
        let mut stage = Stage::default();
        let start = Instant::now();
        let mut told = |seconds: u64, percent: u32| {
            let line = format!(
                "Loading safetensors checkpoint shards: {percent:3}% Completed | 1/8 [00:07<00:49,  7.1s/it]"
            );
            stage.told_by(&line, start + Duration::from_secs(seconds))
        };
        assert_eq!(told(0, 0).as_deref(), Some("loading the model, 0 %"));
        assert_eq!(told(4, 12), None);
        assert_eq!(told(7, 25).as_deref(), Some("loading the model, 25 %"));
        assert_eq!(told(60, 100).as_deref(), Some("loading the model, 100 %"));
    }
}
