//! The order of a crate's top-level modules: a module may use the modules of lower levels.

use std::collections::BTreeSet;

use super::references::References;
use super::source::Package;

/// Printed lines, sorted.
pub(super) type Lines = BTreeSet<String>;

/// The order of a crate's modules.
#[derive(Clone, Copy, Debug)]
pub(super) struct Order {
    pub(super) package: &'static str,
    /// The levels, the top level first.
    pub(super) levels: &'static [Level],
}

/// The modules of one level.
#[derive(Clone, Copy, Debug)]
pub(super) enum Level {
    /// Modules that may not use each other.
    Separate(&'static [&'static str]),
    /// Modules that may use each other.
    #[allow(dead_code, reason = "no crate needs it yet")]
    Together(&'static [&'static str]),
}

/// The orders. Crates without an order are not checked.
pub(super) const ORDERS: &[Order] = &[
    Order {
        package: "chiasm-api",
        levels: &[
            Level::Separate(&["forward"]),
            Level::Separate(&["anthropic", "responses", "stream_begin"]),
            Level::Separate(&["openai", "stream_end"]),
            Level::Separate(&["sse"]),
            Level::Separate(&["error", "server_failure"]),
        ],
    },
    Order {
        package: "chiasm-fleet",
        levels: &[
            Level::Separate(&["members"]),
            Level::Separate(&["keeper", "start"]),
            Level::Separate(&["events", "gauges", "loading", "trial"]),
            Level::Separate(&["fleet"]),
            Level::Separate(&["metrics", "worker_breaker"]),
            Level::Separate(&["breaker", "followed", "kept", "loaded"]),
            Level::Separate(&[
                "adapters",
                "backoff",
                "classes",
                "condition",
                "keys",
                "media_metrics",
                "places",
                "tap",
            ]),
        ],
    },
    Order { package: "chiasm-limit", levels: &[Level::Separate(&["keyed", "owner"])] },
    Order {
        package: "chiasm-otlp",
        levels: &[Level::Separate(&["exporter"]), Level::Separate(&["endpoint", "span"])],
    },
    Order {
        package: "chiasm-pipeline",
        levels: &[
            Level::Separate(&["forward", "generation"]),
            Level::Separate(&["machine", "pick", "tokenize"]),
            Level::Separate(&["prepare"]),
            Level::Separate(&["opening"]),
            Level::Separate(&["pipeline"]),
            Level::Separate(&["choice", "image", "video"]),
            Level::Separate(&[
                "deadlines",
                "output_parsing",
                "plans",
                "processed",
                "processor_items",
                "prompt_price",
                "sampling",
            ]),
            Level::Separate(&["error", "model", "request_context"]),
            Level::Separate(&[
                "answers",
                "displaced",
                "item",
                "last_route",
                "limits",
                "observer",
                "past_attempts",
                "retries",
                "text_logprobs",
            ]),
        ],
    },
    Order {
        package: "chiasm-request",
        levels: &[
            Level::Separate(&["request"]),
            Level::Separate(&["answer", "conversation", "outcome"]),
            Level::Separate(&["answer_events", "defaults", "sampling", "tools"]),
        ],
    },
    Order {
        package: "chiasm-server",
        levels: &[
            Level::Separate(&["server"]),
            Level::Separate(&["routes"]),
            Level::Separate(&["forward", "status"]),
            Level::Separate(&["endpoints"]),
            Level::Separate(&["meter"]),
            Level::Separate(&["admission"]),
            Level::Separate(&["body"]),
            Level::Separate(&["arrival"]),
            Level::Separate(&["connections"]),
            Level::Separate(&["endpoint_state", "layers"]),
            Level::Separate(&["record", "settings"]),
            Level::Separate(&["page"]),
            Level::Separate(&["access", "cors", "http_rules"]),
            Level::Separate(&["error", "identity", "metrics"]),
            Level::Separate(&[
                "connection",
                "connection_metrics",
                "draining",
                "log_counts",
                "paths",
                "poll_epoch",
                "process_metrics",
                "proxies",
                "root_path",
                "routing_headers",
                "slots",
                "sse",
                "tls",
                "traces",
                "workers",
            ]),
        ],
    },
];

impl Level {
    fn modules(self) -> &'static [&'static str] {
        let (Self::Separate(modules) | Self::Together(modules)) = self;
        modules
    }
}

impl Order {
    fn level(&self, module: &str) -> Option<usize> {
        self.levels.iter().position(|level| level.modules().contains(&module))
    }

    fn allows(&self, from: &str, to: &str) -> bool {
        match (self.level(from), self.level(to)) {
            (Some(from), Some(to)) if from == to => matches!(self.levels[from], Level::Together(_)),
            (Some(from), Some(to)) => from < to,
            // A module without a level is reported on its own.
            _ => true,
        }
    }

    /// Returns a line for each arrow against the order, and for each module that is missing from
    /// the crate or from the order.
    pub(super) fn violations(&self, package: &Package, references: &References) -> Lines {
        let name = self.package;
        let mut lines = Lines::new();
        let modules = package.modules.iter().filter_map(|module| module.top_level.as_deref());
        let modules: BTreeSet<&str> = modules.collect();
        let ordered = self.levels.iter().flat_map(|level| level.modules()).copied();
        let ordered: BTreeSet<&str> = ordered.collect();
        for module in modules.difference(&ordered) {
            lines.insert(format!("{name}: `{module}` has no level in structure/orders.rs"));
        }
        for module in ordered.difference(&modules) {
            lines.insert(format!("{name}: structure/orders.rs names `{module}`, which is gone"));
        }
        for reference in references {
            let from = &package.modules[reference.from].top_level;
            let to = &package.modules[reference.to].top_level;
            if let (Some(from), Some(to)) = (from, to)
                && from != to
                && !self.allows(from, to)
            {
                lines.insert(format!("{name}: `{from}` may not use `{to}::{}`", reference.item));
            }
        }
        lines
    }
}
