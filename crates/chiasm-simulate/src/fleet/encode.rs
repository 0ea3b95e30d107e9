//! Encoding of a request's images by encoding engines, before the prompt is computed.

use chiasm_router::EncodeStage;

use super::{Event, Fleet};
use crate::encoder::EncodeJob;
use crate::engine::LiveRequest;
use crate::virtual_time::Nanos;

/// A request whose images are being encoded.
pub(super) struct AwaitingImages {
    live: LiveRequest,
    /// The number of engines that are not done.
    engines: usize,
}

impl Fleet<'_> {
    /// Sends a request's images to encoding engines, with the tensors that the engines lack. All
    /// engines begin at once, and the request waits until the last one is done.
    pub(super) fn send_images(
        &mut self,
        stages: Vec<EncodeStage>,
        mut live: LiveRequest,
        now: Nanos,
    ) {
        let mut jobs = Vec::with_capacity(stages.len());
        for EncodeStage { reservation, items } in stages {
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
            let arrivals =
                images.iter().map(|image| self.make_tensor(worker, *image, now, live.counted));
            let at = arrivals.fold(now, Nanos::max);
            jobs.push((at, worker, EncodeJob::new(live.number, reservation, images)));
        }
        self.awaiting_images.insert(live.number, AwaitingImages { live, engines: jobs.len() });
        for (at, worker, job) in jobs {
            self.plan(at, worker, Event::StartEncode(job));
        }
    }

    /// Delivers a job to an encoding engine, whose tensors have arrived.
    pub(super) fn start_encode(&mut self, worker: usize, job: EncodeJob, now: Nanos) {
        let Some(encoder) = self.encoders.get_mut(&worker) else { return };
        let was_idle = encoder.is_idle();
        encoder.deliver(job, now);
        if was_idle {
            self.plan_encoder(worker);
        }
    }

    /// Ends a step of an encoding engine.
    ///
    /// The frontend is notified of the stored embeddings at once. Requests whose images are all
    /// encoded are sent to the engines that compute their prompts.
    pub(super) fn end_encode_step(&mut self, worker: usize, now: Nanos) {
        let Some(encoder) = self.encoders.get_mut(&worker) else { return };
        let ended = encoder.end_step(now);
        self.plan_encoder(worker);
        for EncodeJob { number, reservation, images, encoded, .. } in ended {
            for image in images {
                reservation.encoded(image.hash(), self.store.bytes(image));
            }
            let Some(awaiting) = self.awaiting_images.get_mut(&number) else { continue };
            awaiting.live.encoded += encoded;
            awaiting.engines -= 1;
            if awaiting.engines == 0
                && let Some(awaiting) = self.awaiting_images.remove(&number)
            {
                self.send_prompt(awaiting.live, now);
            }
        }
    }

    /// Plans the end of the encoder's running step.
    fn plan_encoder(&mut self, worker: usize) {
        if let Some(at) = self.encoders.get(&worker).and_then(|encoder| encoder.step_end()) {
            self.plan(at, worker, Event::EndEncodeStep);
        }
    }
}
