//! Counts of media items that backends hand to engines.

use std::collections::BTreeMap;
use std::fmt;

use chiasm_backend::{MediaDelivery, MediaObserver, SentForm, Transfer};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct TransferLabel {
    mode: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct FormLabel {
    form: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CauseLabel {
    cause: &'static str,
}

/// The kinds of transfer, in the order in which [`MediaMetrics::delivered`] counts them.
const TRANSFERS: [Transfer; 3] = [Transfer::Cached, Transfer::SharedMemory, Transfer::Inline];

/// The counters that backends update as they hand media items to engines.
pub(crate) struct MediaMetrics {
    transfers: Family<TransferLabel, Counter>,
    step_downs: Family<CauseLabel, Counter>,
    sent: Family<FormLabel, Counter>,
    sent_bytes: Counter,
    lent_bytes: Counter,
    misses: Counter,
}

impl Default for MediaMetrics {
    /// Creates all series whose labels are known: Prometheus sees no increase in a series that
    /// appears with its first event. Step-down causes are defined by the backends, so their series
    /// appear with their first items.
    fn default() -> Self {
        let metrics = Self {
            transfers: Family::default(),
            step_downs: Family::default(),
            sent: Family::default(),
            sent_bytes: Counter::default(),
            lent_bytes: Counter::default(),
            misses: Counter::default(),
        };
        for transfer in TRANSFERS {
            drop(metrics.transfers.get_or_create(&TransferLabel { mode: transfer.name() }));
        }
        for form in [SentForm::Encoded, SentForm::Tensors, SentForm::Cut] {
            drop(metrics.sent.get_or_create(&FormLabel { form: form.name() }));
        }
        metrics
    }
}

impl MediaMetrics {
    pub(crate) fn register(&self, r: &mut Registry) {
        r.register(
            "mm_transfer",
            "Media items handed to engines, by kind of transfer",
            self.transfers.clone(),
        );
        r.register(
            "mm_transfer_fallback",
            "Media items that did not use the preferred transfer: shared memory, tensors, or \
             fetching, reading or decoding by the agent; by cause",
            self.step_downs.clone(),
        );
        r.register(
            "media_sent_items",
            "Media items sent to agents that lacked them: \
             encoded as the client sent them, as tensors, or as the cut of a video",
            self.sent.clone(),
        );
        r.register(
            "media_sent_bytes",
            "Bytes of files, tensors and cuts of media items sent to agents that lacked them",
            self.sent_bytes.clone(),
        );
        r.register(
            "media_lent_bytes",
            "Bytes of tensors that agents read from this process's memory by NIXL, \
             of media items that they lacked",
            self.lent_bytes.clone(),
        );
        r.register(
            "mm_cache_misses",
            "Media items that engines no longer held when a request referred to them",
            self.misses.clone(),
        );
    }

    /// Returns the number of media items handed to engines so far, by kind of transfer.
    pub(crate) fn transfers(&self) -> BTreeMap<&'static str, u64> {
        let count =
            |mode| self.transfers.get(&TransferLabel { mode }).map_or(0, |count| count.get());
        TRANSFERS.map(|transfer| (transfer.name(), count(transfer.name()))).into()
    }
}

impl MediaObserver for MediaMetrics {
    fn delivered(&self, delivered: MediaDelivery) {
        let items = [delivered.cached, delivered.shared_memory, delivered.inline];
        for (transfer, items) in TRANSFERS.into_iter().zip(items) {
            if items > 0 {
                let label = TransferLabel { mode: transfer.name() };
                self.transfers.get_or_create(&label).inc_by(items as u64);
            }
        }
    }

    fn missed(&self, items: usize) {
        self.misses.inc_by(items as u64);
    }

    fn sent(&self, bytes: u64) {
        self.sent_bytes.inc_by(bytes);
    }

    fn sent_as(&self, form: SentForm) {
        self.sent.get_or_create(&FormLabel { form: form.name() }).inc();
    }

    fn lent(&self, bytes: u64) {
        self.lent_bytes.inc_by(bytes);
    }

    /// Logs each cause once.
    fn stepped_down(&self, cause: &'static str, why: &dyn fmt::Display) {
        if self.step_downs.get_or_create(&CauseLabel { cause }).inc() == 0 {
            tracing::warn!(
                cause, %why,
                "a media item does not use the preferred transfer (logged once per cause)"
            );
        }
    }
}
