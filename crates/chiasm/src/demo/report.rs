//! The demo's output: text for people, or JSON lines for programs.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use chiasm_server::PAGE_PATH;
use serde_json::json;

use super::player::{Answer, ImageCounts};
use crate::stdout::line;

/// Sums over the requests of one run.
#[derive(Clone, Debug, Default)]
pub(super) struct Totals {
    requests: usize,
    blocks: usize,
    overlap: usize,
    prompt_tokens: u64,
    cached_tokens: u64,
    ttft: Duration,
    pub(super) images: ImageCounts,
}

impl Totals {
    pub(super) fn add(&mut self, answer: &Answer) {
        self.requests += 1;
        self.blocks += answer.total;
        self.overlap += answer.overlap;
        self.prompt_tokens += answer.prompt_tokens;
        self.cached_tokens += answer.cached_tokens;
        self.ttft += answer.ttft;
    }

    /// Returns the fraction of prompt tokens that engines found in their caches.
    fn hit_rate(&self) -> f64 {
        self.cached_tokens as f64 / self.prompt_tokens.max(1) as f64
    }

    fn mean_ttft_ms(&self) -> f64 {
        self.ttft.as_secs_f64() * 1000.0 / self.requests.max(1) as f64
    }
}

pub(super) struct Report {
    json: bool,
}

impl Report {
    pub(super) fn new(json: bool) -> Self {
        Self { json }
    }

    pub(super) fn print_opening(&self, engines: usize, model: &str) {
        if !self.json {
            line!(
                "A frontend with KV-aware routing in front of {engines} simulated engines, \
                 model '{model}'."
            );
            line!(
                "Overlap: leading blocks of the prompt that the worker holds. \
                 Cached: the engine's own count.\n"
            );
        }
    }

    pub(super) fn print_answer(&self, scenario: &str, answer: &Answer) {
        let ttft_ms = (answer.ttft.as_secs_f64() * 10_000.0).round() / 10.0;
        if self.json {
            let line = json!({
                "scenario": scenario,
                "request": answer.request,
                "worker": answer.worker,
                "blocks_total": answer.total,
                "blocks_overlap": answer.overlap,
                "prompt_tokens": answer.prompt_tokens,
                "cached_tokens": answer.cached_tokens,
                "transfer": answer.transfer,
                "ttft_ms": ttft_ms,
            });
            line!("{line}");
            return;
        }
        let pixels = match answer.images {
            0 => "no pixels".to_owned(),
            1 => format!("1 image {}", answer.transfer),
            images => format!("{images} images {}", answer.transfer),
        };
        line!(
            "{scenario:<35} {}  {}  {:>2}/{:<2} blocks overlap, {:>3} of {:>3} prompt tokens \
             cached, {pixels}, first token {ttft_ms:.1} ms",
            answer.request,
            answer.worker,
            answer.overlap,
            answer.total,
            answer.cached_tokens,
            answer.prompt_tokens,
        );
    }

    pub(super) fn print_summary(&self, kv: &Totals, round_robin: &Totals) {
        if self.json {
            return;
        }
        line!("\nThe same {} requests under both policies:", kv.requests);
        for (policy, totals) in [("KV routing", kv), ("round-robin", round_robin)] {
            line!(
                "  {policy:<12}  {:>4.1} % of prompt tokens cached, {:>3} of {} blocks overlap, \
                 first token after {:.1} ms on average",
                100.0 * totals.hit_rate(),
                totals.overlap,
                totals.blocks,
                totals.mean_ttft_ms(),
            );
        }
        let ImageCounts { decoded, cached, shm, inline } = kv.images;
        line!(
            "\nOf {} images in prompts under KV routing, the engines had cached {cached}; {shm} \
             were sent in shared memory and {inline} in messages. {decoded} were decoded.",
            cached + shm + inline,
        );
    }

    pub(super) fn print_keep_hint(&self) {
        if !self.json {
            line!(
                "\nNext: `chiasm demo --keep` keeps the server running; \
                 `chiasm serve --help` describes serving with real engines."
            );
        }
    }

    pub(super) fn print_next_steps(&self, address: SocketAddr, model: &str, picture: &Path) {
        let command = format!(
            "curl -s http://{address}/v1/chat/completions \
             -H 'content-type: application/json' -d @- <<EOF\n\
             {{\"model\": \"{model}\", \"messages\": [{{\"role\": \"user\", \"content\": [\n  \
             {{\"type\": \"image_url\", \"image_url\": \
             {{\"url\": \"data:image/jpeg;base64,$(base64 < '{}' | tr -d '\\n')\"}}}},\n  \
             {{\"type\": \"text\", \"text\": \"What is in this picture?\"}}]}}]}}\nEOF",
            picture.display()
        );
        let page = format!("http://{address}{}/", PAGE_PATH);
        if self.json {
            line!(
                "{}",
                json!({"url": format!("http://{address}/v1"), "page": page, "model": model})
            );
        } else {
            line!(
                "\nThe server runs at http://{address}/v1 until Ctrl-C; \
                 its live page is {page}. Try:\n\n{command}"
            );
        }
    }
}
