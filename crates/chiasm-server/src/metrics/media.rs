//! What backends tell of media items that they hand to engines.

use std::fmt;

use chiasm_backend::{Delivered, MediaObserver, SentForm, Transfer};

use super::Metrics;
use super::labels::{CauseLabel, FormLabel, TransferLabel};

impl MediaObserver for Metrics {
    fn delivered(&self, delivered: Delivered) {
        let ways = [
            (Transfer::Cached, delivered.cached),
            (Transfer::SharedMemory, delivered.shared_memory),
            (Transfer::Inline, delivered.inline),
        ];
        for (how, items) in ways.into_iter().filter(|&(_, items)| items > 0) {
            self.transfers.get_or_create(&TransferLabel { mode: how.name() }).inc_by(items as u64);
        }
    }

    fn missed(&self, items: usize) {
        self.mm_cache_misses.inc_by(items as u64);
    }

    fn sent(&self, bytes: u64) {
        self.media_sent_bytes.inc_by(bytes);
    }

    fn sent_as(&self, form: SentForm) {
        self.media_sent.get_or_create(&FormLabel { form: form.name() }).inc();
    }

    fn lent(&self, bytes: u64) {
        self.media_lent_bytes.inc_by(bytes);
    }

    /// Logs each cause once.
    fn stepped_down(&self, cause: &'static str, why: &dyn fmt::Display) {
        if self.step_downs.get_or_create(&CauseLabel { cause }).inc() == 0 {
            tracing::warn!(cause, %why, "a media item does not travel as it was to; told once for each cause");
        }
    }
}

/// Makes the series of all ways exist from the start. The causes of stepping down belong to the backends: a cause's series appears
/// with its first item.
pub(super) fn begin_at_zero(metrics: &Metrics) {
    for way in [Transfer::Cached, Transfer::SharedMemory, Transfer::Inline] {
        drop(metrics.transfers.get_or_create(&TransferLabel { mode: way.name() }));
    }
    for form in [SentForm::Encoded, SentForm::Tensors] {
        drop(metrics.media_sent.get_or_create(&FormLabel { form: form.name() }));
    }
}
