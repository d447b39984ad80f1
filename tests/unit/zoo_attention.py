"""Transformers and networks alike, as users write them: by modules of PyTorch, and by hand."""

import torch
from torch import nn
from torch.nn import functional


class ViT(nn.Module):
    """Vision transformer of `nn.TransformerEncoderLayer`, with a class token and learned positions."""

    def __init__(self, width=24, heads=2, depth=1, patch=4, side=16, dropout=0.1, classes=10):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, width))
        layer = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.position
        return self.head(self.norm(self.encoder(x)[:, 0]))


class Attention(nn.Module):
    """Self-attention by `scaled_dot_product_attention`."""

    def __init__(self, width, heads, causal=False, dropout=0.0):
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(x).reshape(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width, heads, causal=False, dropout=0.0):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, causal, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class HandmadeViT(nn.Module):
    """Vision transformer by `scaled_dot_product_attention`; patches by reshaping; the head averages the tokens."""

    def __init__(self, width=24, heads=2, depth=2, patch=4, side=16, classes=10):
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(3 * patch**2, width)
        self.position = nn.Parameter(0.02 * torch.randn((side // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        x = functional.unfold(x, self.patch, stride=self.patch).transpose(1, 2)
        x = self.blocks(self.embed(x) + self.position)
        return self.head(self.norm(x).mean(dim=1))


class WindowAttention(nn.Module):
    """Attention inside windows, with a learned bias for each relative position and a mask of shifted windows."""

    def __init__(self, width, heads, window, side, shift):
        super().__init__()
        self.heads, self.window, self.shift = heads, window, shift
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.table = nn.Parameter(0.02 * torch.randn((2 * window - 1) ** 2, heads))
        places = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        apart = places[:, :, None] - places[:, None, :] + window - 1
        self.register_buffer("index", apart[0] * (2 * window - 1) + apart[1])
        regions = (torch.arange(side) >= side - window).int() + (torch.arange(side) >= side - shift).int()
        region = self.windows((3 * regions[:, None] + regions)[None, :, :, None])[..., 0]
        mask = torch.zeros(len(region), window**2, window**2)
        mask.masked_fill_(region[:, :, None] != region[:, None, :], -100.0)
        self.register_buffer("mask", mask if shift else None, persistent=False)

    def windows(self, x):
        """Images [b, h, w, c] as windows [b · number, window², c]."""
        batch, height, width, channels = x.shape
        x = x.view(batch, height // self.window, self.window, width // self.window, self.window, channels)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.window**2, channels)

    def forward(self, x):
        batch, height, width, channels = x.shape
        shifted = torch.roll(x, (-self.shift, -self.shift), dims=(1, 2)) if self.shift else x
        windows = self.windows(shifted)
        count, length, _ = windows.shape
        query, key, value = self.qkv(windows).view(count, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = query @ key.transpose(-2, -1) * (channels // self.heads) ** -0.5
        scores = scores + self.table[self.index.view(-1)].view(length, length, -1).permute(2, 0, 1)
        if self.mask is not None:
            scores = scores.view(batch, -1, self.heads, length, length) + self.mask[:, None]
            scores = scores.view(-1, self.heads, length, length)
        y = self.out((scores.softmax(dim=-1) @ value).transpose(1, 2).reshape(count, length, channels))
        y = y.view(batch, height // self.window, width // self.window, self.window, self.window, channels)
        y = y.permute(0, 1, 3, 2, 4, 5).reshape(batch, height, width, channels)
        return torch.roll(y, (self.shift, self.shift), dims=(1, 2)) if self.shift else y


class Swin(nn.Module):
    """Attention in windows and in shifted windows, and a merge of 2 × 2 patches."""

    def __init__(self, width=12, heads=2, patch=2, window=4, side=16, classes=10):
        super().__init__()
        side //= patch
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attentions = nn.ModuleList(
            WindowAttention(width, heads, window, side, shift) for shift in (0, window // 2)
        )
        self.merge = nn.Sequential(nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False))
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x):
        x = self.patches(x).permute(0, 2, 3, 1)
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            x = x + attention(norm(x))
        x = torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], dim=-1)
        return self.head(self.merge(x).mean((1, 2)))


class MixerBlock(nn.Module):
    def __init__(self, tokens, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nn.Module):
    """MLP-Mixer: linear layers over patches and over channels in turn."""

    def __init__(self, width=16, depth=2, patch=4, side=16, classes=10):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.blocks = nn.Sequential(*(MixerBlock((side // patch) ** 2, width) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


class GPT(nn.Module):
    """Causal language model: learned positions, dropout, one weight for embedding and head."""

    def __init__(self, vocabulary=17, width=20, heads=1, depth=2, length=8, dropout=0.1):
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True, dropout=dropout) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Translator(nn.Module):
    """Encoder of PyTorch's layers, decoder of `MultiheadAttention`: padding and causal masks, cross-attention."""

    def __init__(self, vocabulary=13, width=16, heads=4):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.encoder = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True)
        self.norm, self.own = nn.LayerNorm(width), nn.MultiheadAttention(width, heads, batch_first=True)
        self.cross = nn.MultiheadAttention(width, heads, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source, target):
        padding = source == 0
        memory = self.encoder(self.embedding(source), src_key_padding_mask=padding)
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], target.device, memory.dtype)
        x = self.embedding(target)
        x = x + self.own(x, x, x, attn_mask=causal, need_weights=False)[0]
        y, weights = self.cross(self.norm(x), memory, memory, key_padding_mask=padding)
        return self.head(x + y + weights.sum(-1, keepdim=True))
