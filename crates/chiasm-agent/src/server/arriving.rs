//! Messages that are on their way here: counted as their bytes come, whatever length is claimed.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use chiasm_media::{ByteBudget, Charge};
use http_body::{Frame, SizeHint};
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tower_service::Service;

use crate::{CHUNK, MOST_MESSAGE_BYTES};

/// Bytes of all messages that have begun to come and are not whole, of all frontends.
pub(super) const MOST_ARRIVING: u64 = 512 << 20;
/// Bytes of a message that is no job, nor anything else about jobs: files and tensors come in pieces.
const MOST_SHORT: usize = 4 * CHUNK;
/// What stands before each message of gRPC: whether it is compressed, and its length.
const PREFIX: usize = 5;

/// A service whose callers' messages are counted while they come. Who has no room for more of one has its call ended: a frontend's
/// messages are whole within milliseconds.
#[derive(Clone)]
pub(super) struct Counting<S> {
    service: S,
    budget: ByteBudget,
}

impl<S> Counting<S> {
    /// Counts in this budget.
    pub(super) fn new(service: S, budget: ByteBudget) -> Self {
        Self { service, budget }
    }
}

impl<S: NamedService> NamedService for Counting<S> {
    const NAME: &'static str = S::NAME;
}

impl<S: Service<http::Request<Body>>> Service<http::Request<Body>> for Counting<S> {
    type Response = S::Response;
    type Error = S::Error;
    type Future = S::Future;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> S::Future {
        let is_jobs = request.uri().path().ends_with("/Generate");
        let most = if is_jobs { MOST_MESSAGE_BYTES } else { MOST_SHORT };
        let message = Message::new(self.budget.empty_charge(), most);
        self.service.call(request.map(|body| Body::new(Counted { body, message })))
    }
}

/// What a caller sends.
struct Counted {
    body: Body,
    message: Message,
}

impl http_body::Body for Counted {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = &mut *self;
        Pin::new(&mut this.body).poll_frame(context).map(|next| {
            next.map(|frame| {
                let frame = frame?;
                frame.data_ref().map_or(Ok(()), |bytes| this.message.take(bytes))?;
                Ok(frame)
            })
        })
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The message that is coming.
struct Message {
    prefix: [u8; PREFIX],
    /// How many bytes of the prefix have come.
    begun: usize,
    /// How many bytes come after it yet.
    missing: usize,
    /// How many may.
    most: usize,
    /// Counts what has come.
    charge: Charge,
}

impl Message {
    fn new(charge: Charge, most: usize) -> Self {
        Self { prefix: [0; PREFIX], begun: 0, missing: 0, most, charge }
    }

    /// More has come, of this message and perhaps of later ones. What is whole is its reader's to count.
    fn take(&mut self, mut bytes: &[u8]) -> Result<(), Status> {
        let mut came = 0;
        while !bytes.is_empty() {
            if self.begun < PREFIX {
                let (now, later) = bytes.split_at(bytes.len().min(PREFIX - self.begun));
                self.prefix[self.begun..self.begun + now.len()].copy_from_slice(now);
                (self.begun, bytes) = (self.begun + now.len(), later);
                let [_, length @ ..] = self.prefix;
                self.missing = if self.begun == PREFIX { u32::from_be_bytes(length) as usize } else { 0 };
                if self.missing > self.most {
                    return Err(Status::out_of_range(format!("a message has {} bytes at most", self.most)));
                }
            } else {
                let now = bytes.len().min(self.missing);
                (self.missing, bytes, came) = (self.missing - now, &bytes[now..], came + now);
            }
            if self.begun == PREFIX && self.missing == 0 {
                (self.begun, came) = (0, 0);
                self.charge.shrink_to(0);
            }
        }
        let full = |_| Status::resource_exhausted("too much is on its way there");
        if came > 0 { self.charge.grow(came as u64).map_err(full) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_come_of_a_message_is_counted_until_it_is_whole() {
        let budget = ByteBudget::new(1000);
        let message = |length: usize| [&[0][..], &(length as u32).to_be_bytes(), &vec![7; length]].concat();
        let sent = [message(300), message(0), message(500), message(1)].concat();
        for piece in [1, 2, 5, 7, 99, 305, 400, sent.len()] {
            let mut coming = Message::new(budget.empty_charge(), 500);
            let mut most = 0;
            for bytes in sent.chunks(piece) {
                coming.take(bytes).unwrap();
                most = most.max(budget.held());
            }
            // The last piece of the longest is never held: it is whole then.
            assert!(most < 500 && (piece > 400 || most > 0), "{piece}: {most}");
            assert_eq!(budget.held(), 0);
        }
    }

    #[test]
    fn who_claims_much_and_sends_little_holds_little_and_all_hold_no_more_than_there_is() {
        let budget = ByteBudget::new(1000);
        let claim = [&[0][..], &u32::MAX.to_be_bytes(), &[7; 395]].concat();
        let mut coming: Vec<_> = (0..3).map(|_| Message::new(budget.empty_charge(), usize::MAX)).collect();
        let taken = coming.iter_mut().map(|message| message.take(&claim).map_err(|status| status.code()));
        assert_eq!(taken.collect::<Vec<_>>(), [Ok(()), Ok(()), Err(tonic::Code::ResourceExhausted)]);
        assert_eq!(budget.held(), 790);
        drop(coming);
        let mut longer = Message::new(budget.empty_charge(), 500);
        assert_eq!(longer.take(&claim).unwrap_err().code(), tonic::Code::OutOfRange);
        assert_eq!(budget.held(), 0);
    }
}
