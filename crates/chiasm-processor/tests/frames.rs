//! Frames of a child that leaves, hangs or sends an invalid reply. The child is the scripted one of
//! `processor`.

use std::time::Duration;

use bytes::Bytes;
use chiasm_processor::{FrameReader, FramesCall, Processor, ProcessorError, ProcessorOptions};

use crate::processor::{child_of, item, options, start, wait_end};

/// Returns a call for frames of 2x1 pixels.
fn call(behaviour: &'static str, positions: &[u64]) -> FramesCall {
    let (first, second) = behaviour.split_at(1);
    FramesCall {
        pieces: vec![first.into(), second.into()],
        samples: 20,
        positions: positions.to_vec(),
        width: 2,
        height: 1,
    }
}

/// Reads to the end.
async fn read_all(reader: &mut FrameReader) -> Result<Vec<Bytes>, ProcessorError> {
    let mut frames = Vec::new();
    while let Some(frame) = reader.next().await? {
        frames.push(frame);
    }
    Ok(frames)
}

/// Makes an item and returns the id of its child, which is idle then.
async fn idle_child(processor: &Processor) -> usize {
    child_of(&item(processor, "make").await.unwrap())
}

#[tokio::test]
async fn frames_are_read_through_few_slots() {
    let processor = start().await;
    let child = idle_child(&processor).await;
    for positions in [&[3][..], &[0, 1, 2], &[0, 2, 3, 5, 8, 13, 19], &[]] {
        let mut reader = processor.frames(call("honest", positions)).await.unwrap();
        let frames = read_all(&mut reader).await.unwrap();
        let expected: Vec<Vec<u8>> =
            positions.iter().map(|&position| vec![position as u8; 6]).collect();
        assert_eq!(frames, expected);
        assert!(reader.next().await.unwrap().is_none());
        // The reader keeps neither the child nor its place.
        assert_eq!(idle_child(&processor).await, child);
    }
}

#[tokio::test]
async fn large_frame_is_read_as_a_whole() {
    let processor = start().await;
    let call = FramesCall { width: 600, height: 300, ..call("honest", &[7]) };
    let mut reader = processor.frames(call).await.unwrap();
    assert_eq!(read_all(&mut reader).await.unwrap(), [vec![7; 540_000]]);
}

#[tokio::test]
async fn invalid_reply_ends_the_child() {
    let processor = start().await;
    for (behaviour, expected) in [
        ("position", "a frame 3 at 14 instead of Some((2, 14))"),
        ("offset", "a frame 2 at 13 instead of Some((2, 12))"),
        ("outside", "a frame 2 at 1099511627776"),
        ("truncate", "a frame can't be read"),
        ("early", "not a reply to a video"),
        ("late", "a frame 7 at 4 instead of None"),
        ("expand", "not a reply to a video"),
        ("babble", "sent an invalid reply"),
        ("die", "crashed during the call"),
        ("hang", "within 0.5 s"),
        ("different", "other frames than its index says: one frame"),
        ("refuse", "ValueError: too big"),
    ] {
        let child = idle_child(&processor).await;
        let mut reader = processor.frames(call(behaviour, &[1, 2, 4, 7])).await.unwrap();
        let error = read_all(&mut reader).await.unwrap_err();
        assert!(error.to_string().contains(expected), "{behaviour}: {error}");
        assert_eq!(matches!(error, ProcessorError::OtherFrames(_)), behaviour == "different");
        wait_end(child).await;
        assert!(reader.next().await.is_err(), "{behaviour}");
    }
}

#[tokio::test]
async fn dropped_reader_ends_its_child() {
    let processor = start().await;
    let child = idle_child(&processor).await;
    let mut reader = processor.frames(call("honest", &[1, 2, 3, 4, 5, 6])).await.unwrap();
    reader.next().await.unwrap();
    drop(reader);
    wait_end(child).await;
    idle_child(&processor).await;
}

#[tokio::test]
async fn dropped_future_ends_its_child() {
    let processor = start().await;
    let child = idle_child(&processor).await;
    let mut reader = processor.frames(call("hang", &[1, 2])).await.unwrap();
    reader.next().await.unwrap();
    assert!(tokio::time::timeout(Duration::from_millis(50), reader.next()).await.is_err());
    wait_end(child).await;
    assert!(matches!(reader.next().await, Err(ProcessorError::Unavailable(_))));
}

#[tokio::test]
async fn time_limit_excludes_the_pauses_of_the_reader() {
    let options = ProcessorOptions { timeout: Duration::from_secs(20), ..options("serve") };
    let processor = Processor::start(options).await.unwrap();
    let mut reader = processor.frames(call("honest", &[1, 2, 3, 4, 5])).await.unwrap();
    for _ in 0..5 {
        assert!(reader.next().await.unwrap().is_some());
        tokio::time::pause();
        tokio::time::advance(Duration::from_secs(100)).await;
        tokio::time::resume();
    }
    assert!(reader.next().await.unwrap().is_none());
}

#[tokio::test]
async fn reader_keeps_its_place_until_the_last_frame() {
    let processor = start().await;
    let mut readers = Vec::new();
    for _ in 0..2 {
        readers.push(processor.frames(call("honest", &[1, 2])).await.unwrap());
    }
    let waiting = tokio::spawn({
        let processor = processor.clone();
        async move { idle_child(&processor).await }
    });
    // The spawned task runs until it waits for a child.
    tokio::task::yield_now().await;
    // Two readers have the children, one item waits, and the queue has no room for another one.
    let error = item(&processor, "make").await.unwrap_err();
    assert!(matches!(error, ProcessorError::QueueFull), "{error}");
    assert!(!waiting.is_finished());
    assert_eq!(read_all(&mut readers[0]).await.unwrap().len(), 2);
    waiting.await.unwrap();
}

#[tokio::test]
async fn impossible_call_takes_no_child() {
    let processor = start().await;
    for (call, is_other) in [
        (call("honest", &[20]), true),
        (call("honest", &[2, 1]), true),
        (FramesCall { width: 10_000, height: 10_000, ..call("honest", &[1]) }, false),
    ] {
        let error = processor.frames(call).await.err().unwrap();
        assert_eq!(matches!(error, ProcessorError::OtherFrames(_)), is_other, "{error}");
        assert_eq!(matches!(error, ProcessorError::Refused(_)), !is_other, "{error}");
    }
}
