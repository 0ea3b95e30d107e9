//! The way of a request's images through engines that encode alone, before its prompt is computed.

use chiasm_router::Encodes;

use super::{Fleet, Plan};
use crate::encoder::Encoding;
use crate::engine::Live;
use crate::virtual_time::Nanos;

/// A request whose images are encoded.
pub(super) struct Awaiting {
    live: Live,
    /// Engines that are not done.
    engines: usize,
}

impl Fleet<'_> {
    /// Gives a request's images to engines that encode them, with the tensors that they lack. All
    /// begin at once, and the request waits until the last one is done.
    pub(super) fn encode(&mut self, encodes: Vec<Encodes>, mut live: Live, now: Nanos) {
        let mut ready = Vec::with_capacity(encodes.len());
        for Encodes { reservation, items } in encodes {
            let worker = reservation.worker.0 as usize;
            let image = |hash| {
                live.sequence
                    .items()
                    .iter()
                    .map(|item| item.image)
                    .find(|image| image.hash() == hash)
            };
            let images: Vec<_> = items.into_iter().filter_map(image).collect();
            live.encoded_elsewhere += images.len() as u64;
            let made =
                images.iter().map(|image| self.make_tensor(worker, *image, now, live.counted));
            let at = made.fold(now, Nanos::max);
            ready.push((at, worker, Encoding::new(live.number, reservation, images)));
        }
        self.awaiting.insert(live.number, Awaiting { live, engines: ready.len() });
        for (at, worker, encoding) in ready {
            self.plan(at, worker, Plan::Encode(encoding));
        }
    }

    /// An engine that encodes has all tensors of what it is to encode.
    pub(super) fn begin_encoding(&mut self, worker: usize, encoding: Encoding, now: Nanos) {
        let Some(encoder) = self.encoders.get_mut(&worker) else { return };
        let was_idle = encoder.is_idle();
        encoder.deliver(encoding, now);
        if was_idle {
            self.plan_encoder(worker);
        }
    }

    /// An engine that encodes has ended a step: the frontend hears at once of the embeddings that
    /// are left, and gives requests for which all is encoded to those that compute their prompts.
    pub(super) fn encoded(&mut self, worker: usize, now: Nanos) {
        let Some(encoder) = self.encoders.get_mut(&worker) else { return };
        let ended = encoder.wake(now);
        self.plan_encoder(worker);
        for Encoding { number, reservation, images, encoded, .. } in ended {
            images
                .iter()
                .for_each(|image| reservation.encoded(image.hash(), self.store.bytes(*image)));
            let Some(awaiting) = self.awaiting.get_mut(&number) else { continue };
            awaiting.live.encoded += encoded;
            awaiting.engines -= 1;
            if awaiting.engines == 0
                && let Some(awaiting) = self.awaiting.remove(&number)
            {
                self.give(awaiting.live, now);
            }
        }
    }

    fn plan_encoder(&mut self, worker: usize) {
        if let Some(at) = self.encoders.get(&worker).and_then(|encoder| encoder.step_end()) {
            self.plan(at, worker, Plan::Encoded);
        }
    }
}
