//! Messages that are on their way here: counted as their bytes come, whatever length is claimed.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tonic::Status;
use tonic::body::Body;
use tonic::server::NamedService;
use tower_service::Service;

use crate::wire::Peer;
use crate::{CHUNK, MOST_MESSAGE_BYTES};

/// Bytes of all messages that have begun to come and are not whole, of all frontends.
pub(super) const MOST_ARRIVING: u64 = 512 << 20;
/// Bytes of a message that is no job, nor anything else about jobs: files and tensors come in pieces.
const MOST_SHORT: usize = 4 * CHUNK;
/// What stands before each message of gRPC: whether it is compressed, and its length.
const PREFIX: usize = 5;

/// Bytes of messages that have begun to come, by who sends them. Each address may hold as many as it leaves to all others: one alone half
/// of what there is, two a third each. Whoever comes later finds half as much as each of those before.
#[derive(Clone)]
pub(super) struct Arriving {
    most: u64,
    held: Arc<Mutex<Held>>,
}

#[derive(Default)]
struct Held {
    all: u64,
    /// None of them is zero.
    of: HashMap<Peer, u64>,
}

impl Arriving {
    /// So many bytes of all together.
    pub(super) fn new(most: u64) -> Self {
        Self { most, held: Arc::default() }
    }

    /// A part that holds nothing yet, of what comes from there.
    fn part(&self, of: Peer) -> Part {
        Part { arriving: self.clone(), of, bytes: 0 }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What one message holds until it is whole, or this is dropped.
struct Part {
    arriving: Arriving,
    of: Peer,
    bytes: u64,
}

impl Part {
    /// Holds `more` bytes as well. If there is no room nothing has changed.
    fn grow(&mut self, more: u64) -> Result<(), Status> {
        let Held { all, of } = &mut *self.arriving.held();
        let own = of.get(&self.of).copied().unwrap_or_default() + more;
        if own + *all + more > self.arriving.most {
            return Err(Status::resource_exhausted("too much is on its way there"));
        }
        *all += more;
        of.insert(self.of, own);
        self.bytes += more;
        Ok(())
    }

    fn clear(&mut self) {
        if self.bytes == 0 {
            return;
        }
        let Held { all, of } = &mut *self.arriving.held();
        *all -= self.bytes;
        match of.get_mut(&self.of) {
            Some(own) if *own > self.bytes => *own -= self.bytes,
            _ => drop(of.remove(&self.of)),
        }
        self.bytes = 0;
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        self.clear();
    }
}

/// A service whose callers' messages are counted while they come. Who has no room for more of one has its call ended: a frontend's
/// messages are whole within milliseconds.
#[derive(Clone)]
pub(super) struct Counting<S> {
    service: S,
    arriving: Arriving,
}

impl<S> Counting<S> {
    /// What callers send is counted in `arriving`.
    pub(super) fn new(service: S, arriving: Arriving) -> Self {
        Self { service, arriving }
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
        let from = request.extensions().get::<Peer>().copied().unwrap_or_default();
        let message = Message::new(self.arriving.part(from), most);
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
    part: Part,
}

impl Message {
    fn new(part: Part, most: usize) -> Self {
        Self { prefix: [0; PREFIX], begun: 0, missing: 0, most, part }
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
                self.part.clear();
            }
        }
        if came > 0 { self.part.grow(came as u64) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;

    const ONE: Peer = Peer(Some(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1))));
    const TWO: Peer = Peer(Some(IpAddr::V4(Ipv4Addr::new(10, 0, 0, 2))));
    const FULL: Result<(), tonic::Code> = Err(tonic::Code::ResourceExhausted);

    #[test]
    fn what_has_come_of_a_message_is_counted_until_it_is_whole() {
        let arriving = Arriving::new(1000);
        let message = |length: usize| [&[0][..], &(length as u32).to_be_bytes(), &vec![7; length]].concat();
        let sent = [message(300), message(0), message(500), message(1)].concat();
        for piece in [1, 2, 5, 7, 99, 305, 400, sent.len()] {
            let mut coming = Message::new(arriving.part(ONE), 500);
            let mut most = 0;
            for bytes in sent.chunks(piece) {
                coming.take(bytes).unwrap();
                most = most.max(arriving.held().all);
            }
            // The last piece of the longest is never held: it is whole then.
            assert!(most < 500 && (piece > 400 || most > 0), "{piece}: {most}");
            assert!(arriving.held().all == 0 && arriving.held().of.is_empty());
        }
    }

    #[test]
    fn who_claims_much_and_sends_little_holds_little_and_all_hold_no_more_than_there_is() {
        let arriving = Arriving::new(2000);
        let claim = [&[0][..], &u32::MAX.to_be_bytes(), &[7; 395]].concat();
        let mut coming: Vec<_> = (0..3).map(|_| Message::new(arriving.part(ONE), usize::MAX)).collect();
        let taken = coming.iter_mut().map(|message| message.take(&claim).map_err(|status| status.code()));
        assert_eq!(taken.collect::<Vec<_>>(), [Ok(()), Ok(()), FULL]);
        assert_eq!(arriving.held().all, 790);
        drop(coming);
        let mut longer = Message::new(arriving.part(ONE), 500);
        assert_eq!(longer.take(&claim).unwrap_err().code(), tonic::Code::OutOfRange);
        assert!(arriving.held().all == 0 && arriving.held().of.is_empty());
    }

    #[test]
    fn one_address_leaves_as_much_to_others_as_it_holds_and_may_send_the_largest_message() {
        let arriving = Arriving::new(MOST_ARRIVING);
        let grown = |part: &mut Part, bytes: u64| part.grow(bytes).map_err(|status| status.code());
        let largest = MOST_MESSAGE_BYTES as u64;
        let mut greedy: Vec<_> = (0..5).map(|_| arriving.part(ONE)).collect();
        let taken: Vec<_> = greedy.iter_mut().map(|part| grown(part, largest)).collect();
        assert_eq!(taken, [Ok(()), Ok(()), Ok(()), Ok(()), FULL]);
        let mut others: Vec<_> = (0..3).map(|_| arriving.part(TWO)).collect();
        let taken: Vec<_> = others.iter_mut().map(|part| grown(part, largest)).collect();
        assert_eq!(taken, [Ok(()), Ok(()), FULL]);
        // Whoever has held more than there is left for others gets no more until it is less.
        assert_eq!(grown(&mut greedy[0], 1), FULL);
        greedy.truncate(1);
        assert_eq!((grown(&mut greedy[0], largest), grown(&mut others[2], 1)), (Ok(()), Ok(())));
    }
}
