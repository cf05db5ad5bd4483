# The dashboard as a picture: the same queries, drawn by gnuplot.

import os
import re
import subprocess
import tempfile

import configuration

# The curves are legible on white and on black.  Texts and background follow the reader's colour scheme.
COLOURS = ['#0072b2', '#d55e00', '#009e73', '#cc79a7', '#b8860b', '#56b4e9', '#8a6fd1', '#7f7f7f', '#c0392b', '#16a085']
GREY = '#808080'
STYLE = """<style>
	.background { fill: #ffffff }
	text { fill: #1f2328 }
	@media (prefers-color-scheme: dark) { .background { fill: #0d1117 } text { fill: #e6edf3 } }
</style>
"""
COLUMNS = 3
UNITS = {'ops': 'per second', 's': 'seconds', 'percentunit': 'share', 'short': ''}


def name_of(legend, labels):
    return re.sub(r'{{(\w+)}}', lambda match: labels.get(match[1], ''), legend).strip()


def in_both_schemes(text):
    """A picture of gnuplot whose texts and background follow the reader's colour scheme."""
    text = re.sub(r'(<rect [^>]*)fill="none"', r'\1class="background"', text, count=1)
    return text.replace('<g id="gnuplot_canvas">', STYLE + '<g id="gnuplot_canvas">', 1)


def draw(ask, path, start, seconds, event=None):
    """Ask each query, and write the picture of these seconds, with a line where an event was: its name, and its time."""
    panels = list(configuration.panels())
    rows = -(-len(panels) // COLUMNS)
    with tempfile.TemporaryDirectory() as directory:
        script = [
            'set terminal svg size 1200,%d dynamic enhanced font "sans-serif,11"' % (rows * 230),
            'set output "%s"' % os.path.abspath(path),
            'set multiplot layout %d,%d' % (rows, COLUMNS),
            'set border 3 lc rgb "%s"' % GREY, 'set tics nomirror textcolor rgb "%s"' % GREY,
            'set grid ytics lc rgb "%s" lw 0.3' % GREY,
            'set key outside bottom center horizontal textcolor rgb "%s" noenhanced' % GREY,
            'set xlabel "seconds" textcolor rgb "%s" offset 0,0.6' % GREY,
            'set xrange [0:%d]' % seconds, 'set yrange [0:*]', 'set offsets 0,0,0.1,0']
        number = 0
        for title, unit, queries in panels:
            curves = []
            for expression, legend in queries:
                for series in ask(expression):
                    points = [(when, value) for when, value in series['values'] if value not in ('NaN', '+Inf', '-Inf')]
                    if not points:
                        continue
                    number += 1
                    moves = any(float(value) for _, value in points)
                    file = os.path.join(directory, str(number))
                    with open(file, 'w') as data:
                        data.writelines('%.3f %s\n' % (when - start, value) for when, value in points)
                    curves.append((moves, name_of(legend, series['metric']), file))
            # What is zero all the time only fills the legend, unless all is.
            curves = [curve for curve in curves if curve[0]] or curves[:1]
            script += ['set title "%s" textcolor rgb "%s" noenhanced' % (title.replace('"', ''), GREY),
                       'set ylabel "%s" textcolor rgb "%s"' % (UNITS[unit], GREY)]
            if event:
                at = event[1] - start
                script += ['unset label', 'unset arrow',
                           'set arrow from %.1f,graph 0 to %.1f,graph 1 nohead dt 2 lc rgb "%s"' % (at, at, GREY),
                           'set label "%s" at %.1f,graph 0.93 offset 0.5,0' % (event[0], at)]
            if curves:
                script.append('plot ' + ', '.join('"%s" with lines lw 2 lc rgb "%s" title "%s"' % (
                    file, COLOURS[i % len(COLOURS)], name.replace('"', '')) for i, (_, name, file) in enumerate(curves)))
            else:
                script.append('plot NaN notitle')
        script.append('unset multiplot')
        subprocess.run(['gnuplot'], input='\n'.join(script), text=True, check=True, stderr=subprocess.PIPE)
    # No trace of where and when it was made.
    with open(path, encoding='utf-8') as file:
        text = file.read()
    text = in_both_schemes(re.sub(r'<desc>.*?</desc>\n?', '', text, flags=re.S))
    with open(path, 'w', encoding='utf-8') as file:
        file.write(text)
