//! The rows of our server in comparison with another one.

use peers::row::{Metric, Row, less, more, neutral};

use super::answer::{Answer, Unanswered};
use super::{CASE, Outcome};

/// Returns the rows of our server in comparison with a peer.
pub(super) fn rows(ours: &Outcome, peer: &Outcome) -> Vec<Row> {
    let lengths = Compared::new(&ours.answers, &peer.answers, |answer| Some(answer.prompt_tokens));
    let pixels = Compared::new(&ours.before, &peer.before, |answer| answer.digest.clone());
    let equal = Some(lengths.are_equal());
    let metrics = metrics(ours).into_iter().zip(metrics(peer));
    let row = |((metric, ours), (_, theirs)): ((Metric, f64), _)| {
        let row = metric.row(CASE, &peer.name, ours, theirs);
        // Only what has a direction is compared.
        Row { equal: equal.filter(|_| metric.more_is_better.is_some()), ..row }
    };
    let mut rows: Vec<Row> = metrics.map(row).collect();
    rows.push(lengths.row("prompts of another length", "prompts", &peer.name));
    rows.push(pixels.row("clips with other pixels", "clips", &peer.name));
    rows
}

/// A comparison of answers to the same requests.
struct Compared {
    count: usize,
    different: usize,
}

impl Compared {
    /// Compares a part of the answers. An error differs from everything.
    fn new<T: PartialEq>(
        ours: &[Result<Answer, Unanswered>],
        theirs: &[Result<Answer, Unanswered>],
        part: impl Fn(&Answer) -> Option<T>,
    ) -> Self {
        let part = |answer: &Result<Answer, Unanswered>| answer.as_ref().ok().and_then(&part);
        let is_different = |(ours, theirs)| {
            let ours = part(ours);
            ours.is_none() || ours != part(theirs)
        };
        let different = ours.iter().zip(theirs).filter(|pair| is_different(*pair)).count();
        Self { count: ours.len(), different }
    }

    fn are_equal(&self) -> bool {
        self.different == 0
    }

    fn row(&self, metric: &'static str, unit: &'static str, peer: &str) -> Row {
        let [count, different] = [self.count, self.different].map(|number| number as f64);
        let row = neutral(metric, unit).row(CASE, peer, count, different);
        Row { equal: Some(self.are_equal()), ..row }
    }
}

/// Returns the metrics of a server.
fn metrics(outcome: &Outcome) -> [(Metric, f64); 7] {
    let Outcome { answers, wall, cpu, peak_bytes, .. } = outcome;
    let answered = outcome.answered();
    [
        (more("clips per second of CPU time", "clips/s"), answered / cpu.frontend),
        (more("clips per second", "clips/s"), answered / wall),
        (less("peak memory", "MB"), peak_bytes / 1e6),
        (neutral("errors", "answers"), answers.len() as f64 - answered),
        (neutral("frontend", "cores"), cpu.frontend / wall),
        (neutral("engine", "cores"), cpu.engine / wall),
        (neutral("load generator", "cores"), cpu.clients / wall),
    ]
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::super::Cpu;
    use super::*;

    fn answer(prompt_tokens: u64, digest: &str) -> Result<Answer, Unanswered> {
        Ok(Answer { prompt_tokens, digest: Some(digest.to_owned()) })
    }

    fn outcome(answers: Vec<Result<Answer, Unanswered>>, cpu: f64) -> Outcome {
        Outcome {
            name: "vllm serve 0.1".to_owned(),
            before: vec![answer(9, "00000001")],
            answers,
            wall: 4.0,
            cpu: Cpu { frontend: cpu, engine: 1.0, clients: 0.5 },
            peak_bytes: cpu * 1e9,
        }
    }

    fn find<'a>(rows: &'a [Row], metric: &str) -> &'a Row {
        rows.iter().find(|row| row.metric == metric).unwrap()
    }

    #[test]
    fn rates_and_memory_have_ratios() {
        let answers = vec![answer(9, "00000001"); 8];
        let all = rows(&outcome(answers.clone(), 2.0), &outcome(answers, 6.0));
        let rate = find(&all, "clips per second of CPU time");
        assert_eq!((rate.ours, rate.ratio, rate.equal), (4.0, 3.0, Some(true)));
        assert_eq!(find(&all, "clips per second").ratio, 1.0);
        assert_eq!(find(&all, "peak memory").ratio, 3.0);
        assert!(find(&all, "engine").ratio.is_nan());
        assert_eq!(find(&all, "errors").peer, 0.0);
    }

    #[test]
    fn error_of_peer_makes_outputs_unequal() {
        let ours = outcome(vec![answer(9, "00000001"); 2], 2.0);
        let error = Err(Unanswered("503".to_owned()));
        let theirs = outcome(vec![answer(9, "00000001"), error], 2.0);
        let all = rows(&ours, &theirs);
        assert_eq!(find(&all, "errors").peer, 1.0);
        let rate = find(&all, "clips per second of CPU time");
        assert_eq!((rate.peer, rate.equal), (0.5, Some(false)));
        assert_eq!(find(&all, "prompts of another length").peer, 1.0);
        assert_eq!(find(&all, "clips with other pixels").equal, Some(true));
    }

    #[test]
    fn error_of_both_is_a_difference() {
        let failed = || outcome(vec![Err(Unanswered("503".to_owned()))], 1.0);
        let row = rows(&failed(), &failed());
        assert_eq!(find(&row, "prompts of another length").peer, 1.0);
    }
}
