//! The codecs: sizes, safe starts and droppable pictures from the headers inside samples.

mod bits;
mod h264;
pub(crate) mod hevc;
mod nal;
mod picture;
mod vpx;

use crate::error::IndexError;
use crate::track::{Codec, Track};
use picture::{Picture, StreamHeader};

pub(crate) use picture::RandomAccess;

/// The role of a sample in decoding.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SampleRole {
    pub(crate) start: RandomAccess,
    /// Set if no other picture refers to this one.
    pub(crate) is_droppable: bool,
}

/// The contents of all samples.
#[derive(Debug)]
pub(crate) struct Contents {
    /// Before rotation.
    pub(crate) width: u32,
    pub(crate) height: u32,
    /// The size of the lengths in front of NAL units; 0 for VP8 and VP9.
    pub(crate) length_size: u8,
    /// A role per sample.
    pub(crate) roles: Vec<SampleRole>,
    /// Set if parameter sets change inside the stream.
    pub(crate) has_changing_sets: bool,
}

/// Reads the headers inside all samples, whose ranges must be inside `file`.
pub(crate) fn read_contents(file: &[u8], track: &Track) -> Result<Contents, IndexError> {
    let config = file.get(track.config.clone()).ok_or(IndexError::Malformed)?;
    match track.codec {
        Codec::H264 => {
            let (length_size, sets) = h264::read_config(config).ok_or(IndexError::CodecHeader)?;
            let first = first_sample(file, track);
            let sps = h264::first_sps(&sets).or_else(|| h264::find_sps(first, length_size));
            let header = h264::read_sps(sps.ok_or(IndexError::CodecHeader)?)?;
            h264::check_sps(&sets, header)?;
            let mut in_band = nal::InBandSets::new(&sets);
            let finds_b_slices = !track.has_composition_times;
            let roles = roles(file, track, |sample| {
                let picture =
                    h264::read_sample(sample, length_size, finds_b_slices, header, &mut in_band)?;
                in_band.end_sample(picture.start);
                Ok(picture)
            })?;
            Ok(contents(header, length_size, roles, in_band.has_changes()))
        }
        Codec::Hevc => {
            let config = hevc::read_config(config).ok_or(IndexError::CodecHeader)?;
            let first = first_sample(file, track);
            let sps = hevc::first_sps(&config.sets)
                .or_else(|| hevc::find_sps(first, config.length_size))
                .ok_or(IndexError::CodecHeader)?;
            let header = hevc::read_sps(sps)?;
            if header.is_reordered && !track.has_composition_times && track.samples.len() > 1 {
                return Err(IndexError::Order);
            }
            hevc::check_sps(&config.sets, header)?;
            let mut in_band = nal::InBandSets::new(&config.sets);
            let mut highest_layer = 0;
            let mut roles = roles(file, track, |sample| {
                let picture =
                    hevc::read_sample(sample, &config, header, &mut highest_layer, &mut in_band)?;
                in_band.end_sample(picture.start);
                Ok(picture)
            })?;
            if highest_layer > config.temporal_layers {
                // The configuration is wrong, so higher layers may refer to any picture.
                roles.iter_mut().for_each(|role| role.is_droppable = false);
            }
            Ok(contents(header, config.length_size, roles, in_band.has_changes()))
        }
        Codec::Vp8 => {
            keyed_contents(file, track, vpx::read_vp8, vpx::vp8_size, vpx::check_vp8_size)
        }
        Codec::Vp9 => {
            keyed_contents(file, track, vpx::read_vp9, vpx::vp9_size, vpx::check_vp9_size)
        }
    }
}

/// Reads a codec whose frames have the size. All that state one must state the same.
fn keyed_contents(
    file: &[u8],
    track: &Track,
    read: fn(&[u8]) -> Result<Picture, IndexError>,
    size: fn(&[u8]) -> Result<StreamHeader, IndexError>,
    check: fn(&[u8], StreamHeader) -> Result<(), IndexError>,
) -> Result<Contents, IndexError> {
    let header = size(first_sample(file, track))?;
    let roles = roles(file, track, |sample| {
        let picture = read(sample)?;
        check(sample, header)?;
        Ok(picture)
    })?;
    Ok(contents(header, 0, roles, false))
}

fn first_sample<'a>(file: &'a [u8], track: &Track) -> &'a [u8] {
    track.samples.first().and_then(|sample| file.get(sample.range())).unwrap_or_default()
}

fn contents(
    header: StreamHeader,
    length_size: usize,
    roles: Vec<SampleRole>,
    has_changing_sets: bool,
) -> Contents {
    Contents {
        width: header.width,
        height: header.height,
        length_size: length_size as u8,
        roles,
        has_changing_sets,
    }
}

/// Reads the role of each sample.
fn roles(
    file: &[u8],
    track: &Track,
    mut read: impl FnMut(&[u8]) -> Result<Picture, IndexError>,
) -> Result<Vec<SampleRole>, IndexError> {
    let mut roles = Vec::with_capacity(track.samples.len());
    let mut begins_sequence = false;
    for sample in &track.samples {
        let picture = read(file.get(sample.range()).ok_or(IndexError::Truncated)?)?;
        // Some writers mark all samples as key frames, and intra refresh marks inexact ones.
        let start = if sample.is_sync { picture.start } else { RandomAccess::No };
        if picture.has_b_slice {
            return Err(IndexError::Order);
        }
        // Decoders skip the leading pictures of a new sequence.
        if begins_sequence && picture.start != RandomAccess::Closed {
            return Err(IndexError::Pictures);
        }
        begins_sequence = picture.ends_sequence;
        roles.push(SampleRole { start, is_droppable: picture.is_droppable });
    }
    Ok(roles)
}
