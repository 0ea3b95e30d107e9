//! Matroska and WebM (RFC 9559): the video track as libavformat's `matroskadec.c` reads it.

mod ebml;

use std::collections::BTreeSet;
use std::ops::Range;

use crate::bytes::array_at;
use crate::error::IndexError;
use crate::rational::reduce;
use crate::track::{
    Codec, Colour, Container, Headers, MAX_SAMPLES, Sample, Timing, Track, check_samples,
};
use ebml::{Element, Elements, float, number, unsigned};

const EBML: [u8; 4] = [0x1a, 0x45, 0xdf, 0xa3];
const SEGMENT: u32 = 0x1853_8067;
const INFO: u32 = 0x1549_a966;
const TIMESTAMP_SCALE: u32 = 0x2a_d7b1;
const DURATION: u32 = 0x4489;
const TRACKS: u32 = 0x1654_ae6b;
const TRACK_ENTRY: u32 = 0xae;
const CUES: u32 = 0x1c53_bb6b;
const CUE_POINT: u32 = 0xbb;
const CUE_TIME: u32 = 0xb3;
const CUE_TRACK_POSITIONS: u32 = 0xb7;
const CUE_TRACK: u32 = 0xf7;
const CLUSTER: u32 = 0x1f43_b675;
const TIMESTAMP: u32 = 0xe7;
const SIMPLE_BLOCK: u32 = 0xa3;
const BLOCK_GROUP: u32 = 0xa0;
const BLOCK: u32 = 0xa1;
const REFERENCE_BLOCK: u32 = 0xfb;
/// Lacing in the flags of a block.
const LACING: u8 = 0x06;
const KEY_FRAME: u8 = 0x80;
/// The value of TrackType for videos.
const VIDEO: u64 = 1;
const NANOSECONDS: u64 = 1_000_000_000;
/// libavformat's limit for the parts of a frame rate.
const MAX_RATE_PART: u64 = 30_000;
/// The maximum time of a cluster in ticks. Keeps sums of times far from overflow.
const MAX_TIME: u64 = 1 << 56;

/// Returns `true` if a file begins like a Matroska file.
pub(crate) fn accepts(file: &[u8]) -> bool {
    array_at(file, 0) == Some(EBML)
}

/// Reads the video track of a file.
pub(crate) fn read(file: &[u8]) -> Result<Track, IndexError> {
    let mut info = Info::default();
    let mut video: Option<Video> = None;
    let mut samples = Vec::new();
    let mut cluster_time = 0;
    let mut cues = Vec::new();
    let mut elements = Elements::new(file, 0..file.len());
    while let Some(element) = elements.next() {
        let element = element?;
        match element.id {
            SEGMENT | CLUSTER => {
                cluster_time = 0;
                elements.enter(&element);
            }
            _ if element.is_unsized => return Err(IndexError::Malformed),
            INFO => info.read(file, &element)?,
            CUES => read_cues(file, &element, &mut cues)?,
            TRACKS if video.is_none() => video = Some(Video::read_only(file, &element)?),
            TIMESTAMP => {
                let time = unsigned(&file[element.body]).filter(|&time| time < MAX_TIME);
                cluster_time = time.ok_or(IndexError::Malformed)? as i64;
            }
            SIMPLE_BLOCK | BLOCK_GROUP => {
                let video = video.as_ref().ok_or(IndexError::Malformed)?;
                let sample = read_block(file, &element, video.number, cluster_time)?;
                if samples.len() == MAX_SAMPLES {
                    return Err(IndexError::TooManySamples);
                }
                samples.extend(sample);
            }
            _ => {}
        }
    }
    let video = video.ok_or(IndexError::VideoTracks)?;
    check_samples(&samples, file.len())?;
    let mut timing = timing(&info, &video, &samples)?;
    // libavformat seeks by the cues, which can leave out key frames.
    timing.has_unknown_seek_points = !cues.is_empty() && {
        let sync = samples.iter().filter(|sample| sample.is_sync);
        let key_times: BTreeSet<i64> = sync.map(|sample| sample.pts).collect();
        let cues = cues.iter().filter(|cue| cue.track == Some(video.number));
        cues.map(|cue| cue.time).collect::<BTreeSet<i64>>() != key_times
    };
    let headers = Headers::Made { width: video.width, height: video.height, colour: video.colour };
    Ok(Track {
        container: Container::Matroska,
        codec: video.codec,
        kept: 0..samples.len(),
        samples,
        config: video.config,
        has_composition_times: true,
        rotation: 0,
        timing,
        headers,
    })
}

/// A seek point of a track.
struct Cue {
    track: Option<u64>,
    /// In ticks.
    time: i64,
}

/// Adds the seek points of all tracks.
fn read_cues(file: &[u8], element: &Element, cues: &mut Vec<Cue>) -> Result<(), IndexError> {
    for point in Elements::new(file, element.body.clone()) {
        let point = point?;
        if point.id != CUE_POINT {
            continue;
        }
        let mut time = None;
        for field in Elements::new(file, point.body) {
            let field = field?;
            match field.id {
                CUE_TIME => time = unsigned(&file[field.body]).filter(|&time| time < MAX_TIME),
                CUE_TRACK_POSITIONS => {
                    let time = time.ok_or(IndexError::Malformed)? as i64;
                    let mut track = None;
                    for child in Elements::new(file, field.body) {
                        let child = child?;
                        if child.id == CUE_TRACK {
                            track = unsigned(&file[child.body]);
                        }
                    }
                    cues.push(Cue { track, time });
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// Computes the rate and the frame count of the header.
fn timing(info: &Info, video: &Video, samples: &[Sample]) -> Result<Timing, IndexError> {
    let duration = video.default_duration.filter(|&duration| duration > 0);
    let (numerator, denominator) =
        reduce(NANOSECONDS, duration.ok_or(IndexError::FrameRate)?, MAX_RATE_PART);
    if numerator == 0 || denominator == 0 {
        return Err(IndexError::FrameRate);
    }
    let fps = numerator as f64 / denominator as f64;
    let scale = info.timestamp_scale;
    let ticks = reduce(NANOSECONDS, scale, u32::MAX.into());
    let duration = info.duration.filter(|duration| duration.is_finite() && *duration > 0.0);
    // As in libavformat: floating-point numbers, cut to whole microseconds.
    let duration_us = duration.ok_or(IndexError::FrameCount)? * scale as f64 * 1000.0 / 1e6;
    let duration_us = duration_us as i64;
    let frames = (duration_us as f64 / 1e6 * fps + 0.5).floor() as i64;
    let start = samples.first().map(|sample| sample.pts).unwrap_or_default();
    Ok(Timing {
        ticks: (ticks.0 as u32, ticks.1 as u32),
        fps,
        header_frames: (frames, frames),
        duration_us,
        start,
        seek_origin: start,
        has_unknown_seek_points: false,
    })
}

/// The segment's information.
struct Info {
    /// Nanoseconds per tick.
    timestamp_scale: u64,
    /// In ticks.
    duration: Option<f64>,
}

impl Default for Info {
    fn default() -> Self {
        Self { timestamp_scale: 1_000_000, duration: None }
    }
}

impl Info {
    fn read(&mut self, file: &[u8], element: &Element) -> Result<(), IndexError> {
        for child in Elements::new(file, element.body.clone()) {
            let child = child?;
            let body = &file[child.body];
            match child.id {
                TIMESTAMP_SCALE => {
                    let scale = unsigned(body).filter(|scale| (1..=NANOSECONDS).contains(scale));
                    self.timestamp_scale = scale.ok_or(IndexError::Malformed)?;
                }
                DURATION => self.duration = float(body),
                _ => {}
            }
        }
        Ok(())
    }
}

/// A video track.
#[derive(Debug)]
struct Video {
    number: u64,
    codec: Codec,
    config: Range<usize>,
    width: u16,
    height: u16,
    colour: Option<Colour>,
    /// Nanoseconds per frame.
    default_duration: Option<u64>,
}

impl Video {
    /// Reads the only video track.
    fn read_only(file: &[u8], tracks: &Element) -> Result<Self, IndexError> {
        let mut video = None;
        for entry in Elements::new(file, tracks.body.clone()) {
            let entry = entry?;
            if entry.id != TRACK_ENTRY {
                continue;
            }
            let mut fields = Fields::default();
            fields.read(file, &entry)?;
            if fields.kind != Some(VIDEO) {
                continue;
            }
            if video.replace(fields.into_video()?).is_some() {
                return Err(IndexError::VideoTracks);
            }
        }
        video.ok_or(IndexError::VideoTracks)
    }
}

/// The fields of a track entry.
#[derive(Debug, Default)]
struct Fields {
    number: Option<u64>,
    kind: Option<u64>,
    codec: Option<Codec>,
    config: Range<usize>,
    default_duration: Option<u64>,
    width: Option<u64>,
    height: Option<u64>,
    colour: Option<Colour>,
    is_encoded: bool,
    is_cropped: bool,
    is_shifted: bool,
    has_alpha: bool,
}

impl Fields {
    fn read(&mut self, file: &[u8], entry: &Element) -> Result<(), IndexError> {
        for field in Elements::new(file, entry.body.clone()) {
            let field = field?;
            let body = &file[field.body.clone()];
            match field.id {
                0xd7 => self.number = unsigned(body),
                0x83 => self.kind = unsigned(body),
                0x86 => self.codec = codec(body),
                0x63a2 => self.config = field.body,
                0x23_e383 => self.default_duration = unsigned(body),
                // TrackTimestampScale and CodecDelay.
                0x23_314f => self.is_shifted |= float(body) != Some(1.0),
                0x56aa => self.is_shifted |= unsigned(body) != Some(0),
                // ContentEncodings.
                0x6d80 => self.is_encoded = true,
                0xe0 => self.read_video(file, &field)?,
                _ => {}
            }
        }
        Ok(())
    }

    fn read_video(&mut self, file: &[u8], video: &Element) -> Result<(), IndexError> {
        for field in Elements::new(file, video.body.clone()) {
            let field = field?;
            let body = &file[field.body.clone()];
            match field.id {
                0xb0 => self.width = unsigned(body),
                0xba => self.height = unsigned(body),
                // AlphaMode.
                0x53c0 => self.has_alpha = unsigned(body) != Some(0),
                // Projection, and pixels to crop at the four sides.
                0x7670 | 0x54aa | 0x54bb | 0x54cc | 0x54dd => self.is_cropped = true,
                0x55b0 => self.colour = Some(read_colour(file, &field)?),
                _ => {}
            }
        }
        Ok(())
    }

    fn into_video(self) -> Result<Video, IndexError> {
        if self.is_encoded {
            return Err(IndexError::ContentEncoding);
        }
        if self.is_cropped {
            return Err(IndexError::Crop);
        }
        let side = |side: Option<u64>| side.and_then(|side| u16::try_from(side).ok());
        let (Some(width), Some(height)) = (side(self.width), side(self.height)) else {
            return Err(IndexError::CodecHeader);
        };
        if self.is_shifted {
            return Err(IndexError::TrackTimes);
        }
        Ok(Video {
            number: self.number.ok_or(IndexError::Malformed)?,
            codec: self.codec.filter(|_| !self.has_alpha).ok_or(IndexError::Codec)?,
            config: self.config,
            width,
            height,
            colour: self.colour,
            default_duration: self.default_duration,
        })
    }
}

fn codec(name: &[u8]) -> Option<Codec> {
    let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
    match &name[..end] {
        b"V_MPEG4/ISO/AVC" => Some(Codec::H264),
        b"V_MPEGH/ISO/HEVC" => Some(Codec::Hevc),
        b"V_VP8" => Some(Codec::Vp8),
        b"V_VP9" => Some(Codec::Vp9),
        _ => None,
    }
}

fn read_colour(file: &[u8], element: &Element) -> Result<Colour, IndexError> {
    const UNKNOWN: u16 = 2;
    let mut colour =
        Colour { primaries: UNKNOWN, transfer: UNKNOWN, matrix: UNKNOWN, is_full_range: false };
    for field in Elements::new(file, element.body.clone()) {
        let field = field?;
        let value = unsigned(&file[field.body]).and_then(|value| u16::try_from(value).ok());
        let value = value.unwrap_or(UNKNOWN);
        match field.id {
            0x55b1 => colour.matrix = value,
            0x55b9 => colour.is_full_range = value == 2,
            0x55ba => colour.transfer = value,
            0x55bb => colour.primaries = value,
            _ => {}
        }
    }
    Ok(colour)
}

/// Reads a block. Returns `None` for a block of another track.
fn read_block(
    file: &[u8],
    element: &Element,
    track: u64,
    cluster_time: i64,
) -> Result<Option<Sample>, IndexError> {
    let mut body = element.body.clone();
    let mut is_sync = None;
    if element.id == BLOCK_GROUP {
        let group = body.clone();
        body = 0..0;
        let mut has_reference = false;
        for child in Elements::new(file, group) {
            let child = child?;
            match child.id {
                BLOCK => body = child.body,
                REFERENCE_BLOCK => has_reference = true,
                _ => {}
            }
        }
        is_sync = Some(!has_reference);
    }
    let block = &file[body.clone()];
    let (number, number_bytes) = number(block, 0, 8, false).ok_or(IndexError::Malformed)?;
    if number != track {
        return Ok(None);
    }
    let [high, low, flags] = array_at(block, number_bytes).ok_or(IndexError::Malformed)?;
    if flags & LACING != 0 {
        return Err(IndexError::Lacing);
    }
    let pts = cluster_time + i64::from(i16::from_be_bytes([high, low]));
    let offset = body.start + number_bytes + 3;
    let size = u32::try_from(body.end - offset).map_err(|_| IndexError::Malformed)?;
    Ok(Some(Sample {
        offset,
        size,
        is_sync: is_sync.unwrap_or(flags & KEY_FRAME != 0),
        is_visible: true,
        pts,
        seek_time: pts,
    }))
}
